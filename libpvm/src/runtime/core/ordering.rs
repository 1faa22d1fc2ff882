//! Carries out the causal order of messages: stamps and lists of marks on the links, and looks at
//! the rings. The rules are in [`sempa_proto::causal`].

use super::super::links::Links;
use super::super::shm::ShmRoutes;
use super::Core;
use bytes::{Buf, Bytes};
use sempa_proto::causal::{
    CTX_ORDER, CausalOrder, HOLD_AGE_MAX, OrderMessage, Position, STAMP_BYTES,
};
use sempa_proto::frame::{encode_control, from_bytes, to_bytes};
use sempa_proto::link::{HEAD_BYTES_MAX, Link, ReceivedMessage};
use sempa_proto::message::{MESSAGE_HEAD_BYTES, encode_message_head};
use sempa_proto::task::ToDaemon;
use sempa_proto::{Message, Micros, PvmError, PvmResult, Tid};
use sempa_ring::doorbell::SLOT_COUNT;

/// Size in bytes of the header of a message on a link: stamp and message header.
pub(in crate::runtime) const STAMPED_HEAD_BYTES: usize = STAMP_BYTES + MESSAGE_HEAD_BYTES;
const _: () = assert!(STAMPED_HEAD_BYTES <= HEAD_BYTES_MAX);

/// Maximum number of messages that are held back. Above the maximum, the task accepts no fragments
/// from the peers whose messages are held back.
const HELD_MESSAGES_MAX: usize = 1 << 20;
/// Maximum number of looks at the rings before the messages that are in order are delivered. The
/// next poll continues.
const LOOKS_MAX: usize = 16;
/// Size in bytes that is reserved on a link for a list of marks.
const LIST_BYTES_MAX: usize = 1 << 17;
/// Time after which the senders of awaited messages are asked what they have sent.
const AWAITED_SENDER_CHECK_DELAY: Micros = Micros::from_millis(200);
/// Time between two calls of `CausalOrder::age_holds`, while anything waits for messages. A message
/// waits for at most [`HOLD_AGE_MAX`] such times, one minute in all.
const HOLD_AGE_INTERVAL: Micros = Micros::from_secs(5);
const _: () = assert!(HOLD_AGE_INTERVAL.0 * HOLD_AGE_MAX as u64 == 60_000_000);
/// Time after which peers are told that marks are settled, if no message has told it.
const LIST_REFRESH_DELAY: Micros = Micros::from_secs(1);

/// Times at which the causal order needs attention.
#[derive(Debug, Default)]
pub(super) struct OrderTimers {
    check_senders_at: Option<Micros>,
    age_holds_at: Option<Micros>,
    refresh_lists_at: Option<Micros>,
}

/// Encodes the header that precedes a message on a link.
#[inline]
pub(in crate::runtime) fn stamped_head(stamp: u64, head: &[u8]) -> [u8; STAMPED_HEAD_BYTES] {
    let mut stamped_head = [0; STAMPED_HEAD_BYTES];
    let (stamp_bytes, head_bytes) = stamped_head.split_at_mut(STAMP_BYTES);
    stamp_bytes.copy_from_slice(&stamp.to_le_bytes());
    head_bytes.copy_from_slice(head);
    stamped_head
}

/// Decodes stamp and message; `None` if the message is shorter than its header.
#[inline]
fn decode_stamped(peer: Tid, own_tid: Tid, message: ReceivedMessage) -> Option<(u64, Message)> {
    let ReceivedMessage { head, bytes, .. } = message;
    let is_contiguous = head.is_empty();
    let (mut head_and_body, body) = if is_contiguous {
        (bytes, Bytes::new())
    } else {
        (head, bytes)
    };
    if head_and_body.len() < STAMPED_HEAD_BYTES {
        return None;
    }
    let stamp = head_and_body.get_u64_le();
    let mut message = Message::decode(peer, own_tid, head_and_body)?;
    if !is_contiguous {
        message.body = body;
    }
    Some((stamp, message))
}

fn sent_position(link: &Link) -> Position {
    Position {
        incarnation: link.incarnation(),
        end_seq: link.queued_end_seq(),
    }
}

impl Core {
    pub(in crate::runtime) fn shm_routes_links_and_order(
        &mut self,
    ) -> (&mut ShmRoutes, &mut Links, &mut CausalOrder<Message>) {
        (&mut self.shm_routes, &mut self.links, &mut self.order)
    }

    // ---- sending

    /// Queues a message on its link, behind the list of marks that the peer does not know yet.
    pub(super) fn queue_in_order(&mut self, peer: Tid, message: Message) -> PvmResult<()> {
        let Some(link) = self.get_or_create_link(peer) else {
            return Err(PvmError::OutOfRes);
        };
        if link.is_peer_gone() {
            return Ok(());
        }
        if !link.has_space_for(LIST_BYTES_MAX + STAMPED_HEAD_BYTES + message.body.len()) {
            return Err(PvmError::OutOfRes);
        }
        if let Some(list) = self.order.list_for(peer) {
            self.queue_order_message(peer, &list)?;
        }
        let head = stamped_head(self.order.next_stamp(), &message.encode_head());
        let Some(link) = self.links.get_mut(&peer) else {
            return Err(PvmError::OutOfRes);
        };
        link.send(head, message.body)
            .map_err(|_| PvmError::OutOfRes)
    }

    fn queue_order_message(&mut self, peer: Tid, message: &OrderMessage) -> PvmResult<()> {
        let body = to_bytes(message).map_err(|_| PvmError::OutOfRes)?;
        let stamp = self.order.list_stamp();
        let head = stamped_head(stamp, &encode_message_head(CTX_ORDER, 0, 0, 0));
        let link = self.get_or_create_link(peer).ok_or(PvmError::OutOfRes)?;
        link.send(head, body.into()).map_err(|_| PvmError::OutOfRes)
    }

    /// Records where the message is that was queued last for this peer.
    pub(super) fn record_sent(&mut self, now: Micros, peer: Tid) {
        let Some(link) = self.links.get(&peer).filter(|link| !link.is_peer_gone()) else {
            return;
        };
        let has_ring = self.shm_routes.has_open_ring(peer);
        let is_visible = has_ring && link.is_all_transmitted();
        self.order
            .record_sent(peer, sent_position(link), is_visible);
        if !has_ring && self.order.wants_prompt_acks() {
            if let Some(link) = self.links.get_mut(&peer) {
                link.request_ack();
            }
            self.pump_link(now, peer);
        }
    }

    /// Records that a message was written to a ring that its reader has closed meanwhile.
    #[cold]
    pub(in crate::runtime) fn record_sent_to_closed_ring(&mut self, peer: Tid) {
        if let Some(link) = self.links.get(&peer) {
            let position = sent_position(link);
            self.order.record_sent(peer, position, false);
        }
    }

    /// Settles the messages to this peer that have been acknowledged or are visible.
    pub(in crate::runtime) fn record_progress(&mut self, peer: Tid) {
        if !self.order.has_mark_for(peer) {
            return;
        }
        let Some(link) = self.links.get(&peer) else {
            return;
        };
        let acked = Position {
            incarnation: link.incarnation(),
            end_seq: link.acked_below(),
        };
        let is_ring_complete =
            self.shm_routes.has_open_ring(peer) && link.is_all_transmitted() && link.confirms_all();
        self.order.record_progress(peer, acked, is_ring_complete);
    }

    // ---- receiving

    /// Passes all complete messages of a peer to the causal order. Returns true if there was a
    /// message. The caller completes the arrivals.
    pub(in crate::runtime) fn accept_messages_from(&mut self, peer: Tid) -> bool {
        let mut has_message = false;
        while let Some(link) = self.links.get_mut(&peer)
            && let Some(received_message) = link.take_message()
        {
            let position = Position {
                incarnation: link.incarnation(),
                end_seq: received_message.end_seq,
            };
            // A message shorter than a header is dropped. Only a peer that violates the protocol
            // sends such a message.
            let Some((stamp, message)) = decode_stamped(peer, self.own_tid, received_message)
            else {
                continue;
            };
            has_message = true;
            if message.ctx != CTX_ORDER {
                self.order.accept_message(peer, position, stamp, message);
            } else if let Ok(order_message) = from_bytes(&message.body) {
                self.order
                    .accept_order_message(peer, position, stamp, order_message);
            }
        }
        self.record_progress(peer);
        has_message
    }

    /// True if no more fragments of this peer can be accepted at present.
    pub(in crate::runtime) fn refuses_data_of(&self, peer: Tid) -> bool {
        self.inbox_is_full()
            || (self.order.held_count() >= HELD_MESSAGES_MAX && self.order.is_holding(peer))
    }

    /// Looks at the rings until the messages that have arrived are in causal order, and puts these
    /// into the inbox.
    #[inline]
    pub(in crate::runtime) fn complete_arrivals(&mut self, now: Micros) {
        if self.order.needs_attention() {
            self.complete_waiting_arrivals(now);
        }
    }

    fn complete_waiting_arrivals(&mut self, now: Micros) {
        if let Some(sender) = self.order.only_sender()
            && let sender_slot = self.shm_routes.slot(sender).unwrap_or(SLOT_COUNT)
            && !self.shm_routes.has_readable_ring_besides(sender_slot)
        {
            // The second look has found nothing in other rings, so the order of the one ring is
            // right.
            self.order.end_without_look();
        }
        loop {
            self.complete_looks(now);
            self.deliver_ordered();
            if !self.order.take_released() || self.deferred_deliveries.is_empty() {
                break;
            }
            self.deliver_deferred_of_released();
        }
        self.release_daemon_items(now);
        self.schedule_order_timers(now);
    }

    fn complete_looks(&mut self, now: Micros) {
        self.send_order_answers(now);
        for _ in 0..LOOKS_MAX {
            if !self.order.is_waiting_for_look() {
                break;
            }
            if self.shm_routes.is_empty() {
                self.order.end_without_look();
                break;
            }
            self.order.begin_look();
            self.look_at_rings(now);
            self.order.end_look();
        }
        self.send_order_answers(now);
    }

    fn deliver_ordered(&mut self) {
        while let Some(message) = self.order.next_delivery() {
            self.deliver(message);
        }
    }

    /// Delivers everything that has arrived, although more may be awaited.
    pub(super) fn deliver_unordered(&mut self) {
        self.order.release_all();
        self.deliver_ordered();
        self.release_all_daemon_items();
        self.order.release_all();
        self.deliver_ordered();
    }

    pub(super) fn send_order_answers(&mut self, now: Micros) {
        while let Some((peer, answer)) = self.order.next_answer() {
            if self.queue_order_message(peer, &answer).is_ok() {
                self.pump_link(now, peer);
                if answer.is_awaited() {
                    self.shm_routes.request_drainer_of(peer);
                }
            }
        }
    }

    /// Continues in a new incarnation of the link with this peer.
    pub(in crate::runtime) fn reset_order(&mut self, peer: Tid) {
        let Some(link) = self.links.get(&peer) else {
            return;
        };
        self.order.handle_link_reset(peer, link.incarnation());
        self.record_retained_messages(peer);
    }

    /// Records that the predecessor process has received the messages that this link does not
    /// expect any more.
    pub(super) fn take_over_received_messages(&mut self, link: &Link) {
        let position = Position {
            incarnation: link.incarnation(),
            end_seq: link.expected_seq(),
        };
        self.order.take_over_peer(link.peer(), position);
    }

    /// Records that the messages that the link retains may not have arrived.
    pub(super) fn record_retained_messages(&mut self, peer: Tid) {
        if let Some(link) = self.links.get(&peer).filter(|link| !link.is_all_acked()) {
            let position = sent_position(link);
            self.order.record_sent(peer, position, false);
        }
    }

    // ---- timers

    pub(in crate::runtime) fn schedule_order_timers(&mut self, now: Micros) {
        let is_awaiting = self.order.is_awaiting();
        if is_awaiting && self.order_timers.check_senders_at.is_none() {
            let check_at = now + AWAITED_SENDER_CHECK_DELAY;
            self.order_timers.check_senders_at = Some(check_at);
            self.schedule_timer(check_at);
        }
        if is_awaiting && self.order_timers.age_holds_at.is_none() {
            let age_at = now + HOLD_AGE_INTERVAL;
            self.order_timers.age_holds_at = Some(age_at);
            self.schedule_timer(age_at);
        }
        if self.order.has_stale_lists() && self.order_timers.refresh_lists_at.is_none() {
            let refresh_at = now + LIST_REFRESH_DELAY;
            self.order_timers.refresh_lists_at = Some(refresh_at);
            self.schedule_timer(refresh_at);
        }
    }

    pub(super) fn run_order_timers(&mut self, now: Micros) {
        let OrderTimers {
            check_senders_at,
            age_holds_at,
            refresh_lists_at,
        } = &mut self.order_timers;
        let must_check = check_senders_at.take_if(|due| *due <= now).is_some();
        let must_age = age_holds_at.take_if(|due| *due <= now).is_some();
        let must_refresh = refresh_lists_at.take_if(|due| *due <= now).is_some();
        let later_timers = [*check_senders_at, *age_holds_at, *refresh_lists_at];
        if must_check {
            // A daemon answers a question to a task that has ended with that.
            self.order.ask_awaited();
            self.send_order_answers(now);
        }
        if must_age {
            self.age_holds(now);
        }
        if must_refresh {
            self.refresh_lists(now);
        }
        for timer_at in later_timers.into_iter().flatten() {
            self.schedule_timer(timer_at);
        }
        self.schedule_order_timers(now);
    }

    /// Delivers what has waited too long for messages of a sender that neither ends nor answers,
    /// and reports the messages that may arrive too late.
    fn age_holds(&mut self, now: Micros) {
        let overdue_count = self.order.age_holds().len();
        if overdue_count > 0
            && let Ok(frame) = encode_control(&ToDaemon::MarksOverdue {
                count: overdue_count as u64,
            })
        {
            // A report that cannot be queued is lost.
            let _ = self.push_control(frame);
        }
        self.complete_arrivals(now);
    }

    fn refresh_lists(&mut self, now: Micros) {
        while let Some((peer, list)) = self.order.next_refreshed_list() {
            if self.tell_if_daemon(peer, &list) {
                continue;
            }
            if self.queue_order_message(peer, &list).is_ok() {
                self.pump_link(now, peer);
                if let Some(link) = self.links.get(&peer) {
                    self.order.record_list_sent(peer, sent_position(link));
                }
            }
        }
        self.send_order_answers(now);
    }
}
