//! Tests of the runtime's state without I/O: limits, restarts, handoffs, and operation without a
//! connection.

use super::*;
use sempa_proto::causal::Past;
use sempa_proto::frame::{FrameDecoder, encode_link};
use sempa_proto::link::LinkState;
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::RestartGroup;
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::task::{ProcessHandoff, RestartInfo, RmServices};

const OWN_TID: Tid = Tid::from_raw(0x40001);
const PEER: Tid = Tid::from_raw(0x40002);

fn new_core() -> Core {
    Core::new(&test_welcome())
}

fn test_welcome() -> Welcome {
    Welcome {
        tid: OWN_TID,
        parent: Tid::NONE,
        host: HostId::MASTER,
        addresses: vec![],
        allows_automatic_routes: true,
        rm: None,
        output_sink: Sink::default(),
        trace_sink: Sink::default(),
        dsig: DSIG_X86_64,
        spawned: false,
        tracer_settings: None,
        past: Default::default(),
        restart_info: None,
        handoff: None,
    }
}

fn message(dst: Tid, tag: i32, body: Bytes) -> Message {
    Message {
        src: OWN_TID,
        dst,
        ctx: CTX_BASE,
        tag,
        wid: 0,
        enc: ENC_XDR,
        body,
    }
}

fn receive_control(core: &mut Core, control: ToTask) -> Result<(), DaemonFrameError> {
    core.handle_control(Micros(0), control)
}

fn quiesced_core() -> Core {
    let mut core = new_core();
    receive_control(
        &mut core,
        ToTask::Quiesce {
            migration: MigrationId(1),
            token_paths: vec![],
        },
    )
    .expect("quiesces");
    core.outbox.clear();
    core.mark_quiesced();
    core
}

/// Above [`DEFERRED_DELIVERIES_MAX`] deferred notifications the oldest notification is delivered
/// early; no notification is lost.
#[test]
fn deferred_notifications_are_bounded_without_loss() {
    let mut core = new_core();
    for tag in 0..=DEFERRED_DELIVERIES_MAX as i32 {
        let message = message(OWN_TID, tag, Bytes::new());
        receive_control(
            &mut core,
            ToTask::Deliver {
                message,
                deliver_after: Some(SendWatermark {
                    peer: PEER,
                    end_seq: 9,
                }),
            },
        )
        .expect("held");
    }
    assert_eq!(core.inbox.iter().map(|m| m.tag).collect::<Vec<_>>(), [0]);
    receive_control(&mut core, ToTask::PeerGone { tid: PEER }).expect("noted");
    assert_eq!(core.inbox.len(), DEFERRED_DELIVERIES_MAX + 1);
    assert!(core.inbox.iter().zip(0..).all(|(m, tag)| m.tag == tag));
}

/// A task retains at most [`ENDED_LINKS_MAX`] links to ended tasks.
#[test]
fn remembered_ended_links_are_bounded() {
    let mut core = new_core();
    for local_number in 2..(ENDED_LINKS_MAX as u32 + 100) {
        let tid = Tid::for_task(HostId::MASTER, local_number).expect("a tid");
        receive_control(&mut core, ToTask::PeerGone { tid }).expect("noted");
    }
    assert_eq!(core.links.len(), ENDED_LINKS_MAX);
}

/// During a migration, control frames are queued up to a total of [`DEFERRED_CONTROL_BYTES_MAX`]
/// bytes; the next frame fails with `OutOfRes`.
#[test]
fn control_queue_during_migration_is_bounded() {
    let mut core = quiesced_core();
    let control_message = message(HostId::MASTER.daemon_tid(), 1, vec![0; 32 << 20].into());
    let accepted_count = (0..100)
        .take_while(|_| core.send_to_daemon(control_message.clone()).is_ok())
        .count();
    assert_eq!(accepted_count, DEFERRED_CONTROL_BYTES_MAX / (32 << 20) - 1);
    assert_eq!(
        core.send_to_daemon(control_message),
        Err(PvmError::OutOfRes)
    );
}

/// Above [`OPEN_REQUESTS_MAX`] open requests a further request fails with `OutOfRes`.
#[test]
fn open_requests_are_bounded() {
    let mut core = new_core();
    for _ in 0..OPEN_REQUESTS_MAX {
        core.send_request(Request::Config).expect("asked");
    }
    assert!(matches!(
        core.send_request(Request::Config),
        Err(Reply::Failed {
            error: PvmError::OutOfRes,
            ..
        })
    ));
}

#[test]
fn links_share_full_outbox_in_turn() {
    let mut core = new_core();
    let peers = [PEER, Tid::from_raw(0x40003)];
    for peer in peers {
        core.send(
            Micros(0),
            message(peer, 1, vec![0; 2 * OUTBOX_BACKLOG_BYTES_MAX].into()),
        )
        .expect("queued");
    }
    assert!(core.outbox.backlog_bytes() < OUTBOX_BACKLOG_BYTES_MAX + (70 << 10));
    assert!(peers.iter().all(|peer| core.waits_for_outbox(*peer)));
    let mut decoder = FrameDecoder::new();
    while !core.outbox.is_empty() {
        let bytes = core
            .outbox
            .next_write()
            .0
            .iter()
            .flat_map(|s| s.to_vec())
            .collect::<Vec<u8>>();
        decoder.push(&bytes);
        core.outbox.remove_written_bytes(bytes.len());
        core.pump(Micros(0));
    }
    assert!(core.has_transmitted_all());
    let mut receiver_order = Vec::new();
    while let Some(frame) = decoder.next_frame().expect("good") {
        receiver_order.push(frame.decode_link().expect("a link frame").dst);
    }
    let second_index = receiver_order
        .iter()
        .position(|dst| *dst == peers[1])
        .expect("sent");
    assert!(
        receiver_order[second_index..].contains(&peers[0]),
        "the second did not wait until the first was done"
    );
}

#[test]
fn second_quiesce_request_is_an_error() {
    let mut core = quiesced_core();
    assert!(
        receive_control(
            &mut core,
            ToTask::Quiesce {
                migration: MigrationId(2),
                token_paths: vec![]
            }
        )
        .is_err()
    );
}

/// A quiesced task transmits nothing and has no timers.
#[test]
fn quiesced_task_transmits_nothing() {
    let mut core = quiesced_core();
    core.send(Micros(0), message(PEER, 1, Bytes::from_static(b"x")))
        .expect("kept");
    core.run_timers(Micros::from_secs(100));
    core.pump(Micros::from_secs(100));
    assert!(
        core.outbox.is_empty() && core.next_timer_at().is_none() && !core.has_transmitted_all()
    );
}

/// An acknowledgement that arrives after its sender has ended does not make the sender count as
/// alive.
#[test]
fn late_ack_does_not_revive_ended_peer() {
    let mut core = new_core();
    core.send(Micros(0), message(PEER, 1, Bytes::new()))
        .expect("sent");
    receive_control(&mut core, ToTask::PeerGone { tid: PEER }).expect("noted");
    let late_ack = LinkFrame {
        src: PEER,
        dst: OWN_TID,
        kind: LinkKind::Ack {
            requests_resync: false,
        },
        seq: 0,
        ack: 2,
        incarnation: 0,
        payload: Bytes::new(),
    };
    let mut decoder = FrameDecoder::new();
    decoder.push(&encode_link(&late_ack));
    let frame = decoder.next_frame().expect("good").expect("whole");
    core.handle_frame(Micros(0), frame, &mut PendingFds::default())
        .expect("ignored");
    assert!(core.has_peer_ended(PEER));
}

/// Returns the frames in the outbox and marks them as written.
fn take_written(core: &mut Core) -> Vec<Frame> {
    let mut decoder = FrameDecoder::new();
    while !core.outbox.is_empty() {
        let bytes = core
            .outbox
            .next_write()
            .0
            .iter()
            .flat_map(|s| s.to_vec())
            .collect::<Vec<u8>>();
        decoder.push(&bytes);
        core.outbox.remove_written_bytes(bytes.len());
    }
    std::iter::from_fn(|| decoder.next_frame().expect("good")).collect()
}

fn link_frames(frames: Vec<Frame>) -> Vec<LinkFrame> {
    let decoded_frames = frames
        .into_iter()
        .filter(|frame| frame.kind == FrameKind::Link);
    decoded_frames
        .map(|frame| frame.decode_link().expect("a link frame"))
        .collect()
}

fn request_ids(frames: Vec<Frame>) -> Vec<RequestId> {
    let control_frames = frames
        .into_iter()
        .filter(|frame| frame.kind == FrameKind::Control);
    let ids =
        control_frames.map(
            |frame| match frame.decode_control::<ToDaemon>().expect("a word") {
                ToDaemon::Request { id, .. } => id,
                other => panic!("{other:?}"),
            },
        );
    ids.collect()
}

fn receive_frame(core: &mut Core, frame: &LinkFrame) {
    let mut decoder = FrameDecoder::new();
    decoder.push(&encode_link(frame));
    let frame = decoder.next_frame().expect("good").expect("whole");
    core.handle_frame(Micros(0), frame, &mut PendingFds::default())
        .expect("taken");
}

/// Quiesces a process, then restarts it together with PEER from a checkpoint in incarnation 3.
/// `repeated_requests` lists the requests to repeat. Returns the frames that the restarted process
/// sends.
fn restart_from_checkpoint(
    core: &mut Core,
    rm: Option<RmInfo>,
    repeated_requests: Vec<RequestId>,
) -> Vec<Frame> {
    receive_control(
        core,
        ToTask::Quiesce {
            migration: MigrationId(1),
            token_paths: vec![],
        },
    )
    .expect("quiesces");
    core.outbox.clear();
    core.mark_quiesced();
    let restart_group = RestartGroup {
        incarnation: 3,
        members: vec![(OWN_TID, 0), (PEER, 0)],
        same_vm: true,
    };
    core.resume(
        Micros(0),
        &Welcome {
            rm,
            restart_info: Some(RestartInfo {
                restart_group,
                requests_to_repeat: repeated_requests,
            }),
            ..test_welcome()
        },
    );
    take_written(core)
}

/// A restarted task repeats the requests that its daemon lists as lost. The repeated requests keep
/// their ids.
#[test]
fn restarted_task_repeats_unanswered_requests() {
    let mut core = new_core();
    let ids: Vec<RequestId> = (0..4)
        .map(|_| core.send_request(Request::Config).expect("asked"))
        .collect();
    receive_control(
        &mut core,
        ToTask::Reply {
            id: ids[1],
            reply: Reply::Done,
        },
    )
    .expect("noted");
    let frames =
        restart_from_checkpoint(&mut core, None, vec![ids[0], ids[1], ids[3], RequestId(77)]);
    // The second request already has its reply. The reply to the third request is still at the
    // daemon.
    assert_eq!(request_ids(frames), [ids[0], ids[3]]);
    assert_eq!(core.take_reply(ids[1]), Some(Reply::Done));
    for id in [ids[0], ids[2], ids[3]] {
        assert_eq!(core.take_reply(id), None);
        receive_control(
            &mut core,
            ToTask::Reply {
                id,
                reply: Reply::Done,
            },
        )
        .expect("noted");
        assert_eq!(core.take_reply(id), Some(Reply::Done));
    }
}

/// A restart counts as one death of the resource manager that was known before the restart, whether
/// or not there is a new resource manager.
#[test]
fn restart_counts_as_rm_death() {
    let rm = |tid| {
        Some(RmInfo {
            tid: Tid::from_raw(tid),
            services: RmServices::default(),
        })
    };
    for (old_rm, new_rm, death_count) in [
        (rm(7), rm(7), 1),
        (rm(7), rm(8), 1),
        (rm(7), None, 1),
        (None, rm(8), 0),
        (None, None, 0),
    ] {
        let mut core = Core::new(&Welcome {
            rm: old_rm,
            ..test_welcome()
        });
        restart_from_checkpoint(&mut core, new_rm, vec![]);
        assert_eq!((core.rm_deaths(), core.rm()), (death_count, new_rm));
    }
}

/// After a restart, links between restarted tasks keep their sequence numbers; all other links
/// start at 1.
#[test]
fn restart_keeps_links_between_members_only() {
    const NON_MEMBER: Tid = Tid::from_raw(0x40003);
    let (mut core, now) = (new_core(), Micros(0));
    for peer in [PEER, NON_MEMBER] {
        core.send(now, message(peer, 1, Bytes::new()))
            .expect("sent");
        let mut peer_message = message(OWN_TID, 2, Bytes::new());
        peer_message.src = peer;
        let payload = Bytes::from(stamped_head(1, &peer_message.encode_head()).to_vec());
        receive_frame(
            &mut core,
            &LinkFrame {
                src: peer,
                dst: OWN_TID,
                kind: LinkKind::Data { is_last: true },
                seq: 1,
                ack: 1,
                incarnation: 0,
                payload,
            },
        );
    }
    assert_eq!(core.inbox.len(), 2);
    let sent_frames = link_frames(restart_from_checkpoint(&mut core, None, vec![]));
    let sent_fields: Vec<_> = sent_frames
        .iter()
        .map(|f| (f.dst, f.kind, f.seq, f.ack, f.incarnation))
        .collect();
    // PEER, which restarted too, is probed. The task outside the checkpoint is not probed, because
    // that task has most probably received everything.
    assert!(
        sent_fields.contains(&(PEER, LinkKind::Probe, 2, 2, 3))
            && sent_fields.iter().all(|sent_fields| sent_fields.0 == PEER),
        "{sent_fields:?}"
    );
    for (peer, seq, ack) in [
        (PEER, 2, 2),
        (NON_MEMBER, 1, 1),
        (Tid::from_raw(0x40004), 1, 1),
    ] {
        core.send(now, message(peer, 1, Bytes::new()))
            .expect("sent");
        let sent_frames = link_frames(take_written(&mut core));
        let sent_fields: Vec<_> = sent_frames
            .iter()
            .map(|f| (f.dst, f.kind, f.seq, f.ack, f.incarnation))
            .collect();
        // A list of the messages to the other peers precedes the message.
        assert_eq!(
            sent_fields.first(),
            Some(&(peer, LinkKind::Data { is_last: true }, seq, ack, 3))
        );
        assert_eq!(sent_fields.len(), if peer == PEER { 1 } else { 2 });
    }
}

/// Offers of direct routes make both tasks use the later incarnation before the route is
/// established.
#[test]
fn direct_offer_aligns_incarnations() {
    let encode_offer = |offer_incarnation| {
        let offer_message = RouteMsg::DirectOffer {
            id: OfferId(1),
            addresses: vec![],
            fingerprint: [7; 32],
            incarnation: offer_incarnation,
            is_automatic: false,
        };
        encode_control(&ToTask::Route {
            sender: PEER,
            same_host: false,
            message: offer_message,
        })
        .expect("short")
    };
    let receive_offer = |core: &mut Core, offer_message: Bytes| {
        let mut decoder = FrameDecoder::new();
        decoder.push(&offer_message);
        let frame = decoder.next_frame().expect("good").expect("whole");
        core.handle_frame(Micros(0), frame, &mut PendingFds::default())
            .expect("taken");
    };
    // A peer that did not restart sends its queued fragments in the new incarnation.
    let mut core = new_core();
    core.send(Micros(0), message(PEER, 1, Bytes::new()))
        .expect("sent");
    assert_eq!(core.incarnation_with(PEER), 0);
    receive_offer(&mut core, encode_offer(3));
    assert_eq!(core.incarnation_with(PEER), 3);
    let last_frame = link_frames(take_written(&mut core))
        .pop()
        .expect("transmitted");
    assert_eq!(
        (last_frame.kind, last_frame.seq, last_frame.incarnation),
        (LinkKind::Data { is_last: true }, 1, 3)
    );
    // A restarted task keeps its own incarnation and announces this incarnation.
    restart_from_checkpoint(&mut core, None, vec![]);
    receive_offer(&mut core, encode_offer(2));
    assert_eq!(core.incarnation_with(PEER), 3);
    core.request_route(Micros(0), Tid::from_raw(0x40003));
    let incarnations = take_written(&mut core)
        .into_iter()
        .filter(|frame| frame.kind == FrameKind::Control);
    let incarnations = incarnations.filter_map(|frame| {
        match frame.decode_control::<ToDaemon>().expect("a word") {
            ToDaemon::Route {
                message:
                    RouteMsg::DirectOffer {
                        incarnation: offer_incarnation,
                        ..
                    },
                ..
            } => Some(offer_incarnation),
            _ => None,
        }
    });
    assert_eq!(incarnations.collect::<Vec<u16>>(), [3]);
}

fn data_frame(src: Tid, dst: Tid, seq: u64, tag: i32) -> LinkFrame {
    let peer_message = Message {
        src,
        ..message(dst, tag, Bytes::new())
    };
    let payload = Bytes::from(stamped_head(1, &peer_message.encode_head()).to_vec());
    LinkFrame {
        src,
        dst,
        kind: LinkKind::Data { is_last: true },
        seq,
        ack: 1,
        incarnation: 0,
        payload,
    }
}

fn control_messages(frames: &[Frame]) -> Vec<ToDaemon> {
    let control_frames = frames
        .iter()
        .filter(|frame| frame.kind == FrameKind::Control);
    control_frames
        .map(|frame| frame.decode_control().expect("a word"))
        .collect()
}

const MIGRATION: MigrationId = MigrationId(7);

/// A successor process continues the links of its predecessor and uses other request ids.
#[test]
fn successor_continues_links_with_new_request_ids() {
    let link_state = LinkState {
        peer: PEER,
        incarnation: 2,
        expected_seq: 5,
        first_seq: 3,
        end_seq: 4,
        peer_gone: false,
    };
    let process_handoff = ProcessHandoff {
        incarnation: 2,
        restart_count: 3,
        links: vec![link_state],
        past: Past::default(),
    };
    let mut core = Core::new(&Welcome {
        handoff: Some(Box::new(process_handoff)),
        ..test_welcome()
    });
    assert!(core.send_request(Request::Config).expect("asked").0 > 3 << 40);
    // A new message is sent only after the unacknowledged fragments of the predecessor.
    core.send(Micros(0), message(PEER, 9, Bytes::new()))
        .expect("sent");
    assert!(
        link_frames(take_written(&mut core))
            .iter()
            .all(|frame| !matches!(frame.kind, LinkKind::Data { .. }))
    );
    receive_frame(
        &mut core,
        &LinkFrame {
            incarnation: 2,
            ..data_frame(OWN_TID, PEER, 3, 8)
        },
    );
    let sent_frames = link_frames(take_written(&mut core));
    let sent_frames = sent_frames
        .iter()
        .filter(|frame| matches!(frame.kind, LinkKind::Data { .. }));
    assert_eq!(
        sent_frames
            .map(|frame| (frame.seq, frame.incarnation, frame.ack))
            .collect::<Vec<_>>(),
        [(3, 2, 5), (4, 2, 5)]
    );
    receive_frame(
        &mut core,
        &LinkFrame {
            incarnation: 2,
            ..data_frame(PEER, OWN_TID, 5, 1)
        },
    );
    assert_eq!(core.inbox.len(), 1);
}

/// Before a requested exit the task hands off link states, deferred notifications and
/// unacknowledged fragments. If the request is withdrawn, the task accepts messages again, and must
/// announce a later exit.
#[test]
fn handoff_contains_links_and_unacked_fragments() {
    let mut core = new_core();
    receive_frame(&mut core, &data_frame(PEER, OWN_TID, 1, 2));
    core.send(Micros(0), message(PEER, 3, Bytes::new()))
        .expect("sent");
    let notification = message(OWN_TID, 4, Bytes::new());
    receive_control(
        &mut core,
        ToTask::Deliver {
            message: notification,
            deliver_after: Some(SendWatermark {
                peer: PEER,
                end_seq: 9,
            }),
        },
    )
    .expect("kept");
    take_written(&mut core);
    receive_control(
        &mut core,
        ToTask::PrepareExit {
            migration: Some(MIGRATION),
        },
    )
    .expect("noted");
    let written_frames = take_written(&mut core);
    let [
        ToDaemon::Handoff {
            migration: MIGRATION,
            incarnation: 0,
            links: link_states,
            past: Past { marks, .. },
            deferred_notifications: notifications,
        },
        ToDaemon::ReadyToExit {
            migration: MIGRATION,
        },
    ] = &control_messages(&written_frames)[..]
    else {
        panic!("{written_frames:?}")
    };
    assert_eq!(
        link_states[..],
        [LinkState {
            peer: PEER,
            incarnation: 0,
            expected_seq: 2,
            first_seq: 1,
            end_seq: 1,
            peer_gone: false
        }]
    );
    assert_eq!((marks.len(), marks[0].receiver), (1, PEER));
    assert_eq!((notifications.len(), notifications[0].0.end_seq), (1, 9));
    let unacked_frames = link_frames(written_frames);
    assert!(
        unacked_frames
            .iter()
            .any(|frame| frame.seq == 1 && matches!(frame.kind, LinkKind::Data { .. })),
        "{unacked_frames:?}"
    );
    // After the handoff, messages are sent regardless of the window.
    core.send(
        Micros(0),
        message(
            PEER,
            3,
            vec![1; 2 * sempa_proto::link::WINDOW_BYTES_MAX].into(),
        ),
    )
    .expect("sent");
    let mut sent_count = 0;
    while core.outbox.backlog_bytes() > 0 {
        sent_count += link_frames(take_written(&mut core)).len();
        core.pump(Micros(0));
    }
    assert_eq!(
        sent_count,
        2 * sempa_proto::link::WINDOW_BYTES_MAX / sempa_proto::link::FRAGMENT_BYTES_MAX + 1
    );
    receive_control(&mut core, ToTask::PrepareExit { migration: None }).expect("noted");
    assert_eq!(
        control_messages(&take_written(&mut core)),
        [ToDaemon::ExitCancelled {
            migration: MIGRATION
        }]
    );
    receive_frame(&mut core, &data_frame(PEER, OWN_TID, 2, 2));
    assert_eq!(core.inbox.len(), 2);
    assert!(core.begin_exit(), "its daemon may wait for this still");
}

/// An exiting task hands off its unread messages, and the next process receives them first.
#[test]
fn exiting_task_hands_off_unread_messages() {
    let mut core = new_core();
    receive_control(
        &mut core,
        ToTask::PrepareExit {
            migration: Some(MIGRATION),
        },
    )
    .expect("noted");
    receive_control(&mut core, ToTask::PrepareExit { migration: None }).expect("noted");
    take_written(&mut core);
    receive_frame(&mut core, &data_frame(PEER, OWN_TID, 1, 2));
    let notification = message(OWN_TID, 4, Bytes::new());
    receive_control(
        &mut core,
        ToTask::Deliver {
            message: notification,
            deliver_after: Some(SendWatermark {
                peer: PEER,
                end_seq: 9,
            }),
        },
    )
    .expect("kept");
    assert!(core.begin_exit(), "it was late");
    receive_frame(&mut core, &data_frame(PEER, OWN_TID, 2, 2));
    receive_control(
        &mut core,
        ToTask::PrepareExit {
            migration: Some(MIGRATION),
        },
    )
    .expect("noted");
    let sent_controls = control_messages(&take_written(&mut core));
    let Some(ToDaemon::Handoff {
        links: link_states,
        deferred_notifications: notifications,
        ..
    }) = sent_controls.first()
    else {
        panic!("{sent_controls:?}")
    };
    assert_eq!((link_states[0].expected_seq, core.inbox.len()), (3, 0));
    assert_eq!(
        notifications
            .iter()
            .map(|(watermark, _)| watermark.end_seq)
            .collect::<Vec<_>>(),
        [0, 0, 9]
    );
    // The next process receives these messages before all others.
    let process_handoff = ProcessHandoff {
        incarnation: 0,
        restart_count: 1,
        links: link_states.clone(),
        past: Past::default(),
    };
    let mut next_core = Core::new(&Welcome {
        handoff: Some(Box::new(process_handoff)),
        ..test_welcome()
    });
    for (watermark, message) in notifications {
        receive_control(
            &mut next_core,
            ToTask::Deliver {
                message: message.clone(),
                deliver_after: Some(*watermark),
            },
        )
        .expect("taken");
    }
    receive_frame(&mut next_core, &data_frame(PEER, OWN_TID, 3, 2));
    let senders: Vec<_> = next_core.inbox.iter().map(|message| message.src).collect();
    assert_eq!(
        senders, [PEER; 3],
        "the notification waits for the last message before it"
    );
}

#[test]
fn exit_in_progress_cannot_be_withdrawn() {
    let mut core = new_core();
    receive_control(
        &mut core,
        ToTask::PrepareExit {
            migration: Some(MIGRATION),
        },
    )
    .expect("noted");
    take_written(&mut core);
    assert!(!core.begin_exit(), "all is said");
    receive_control(&mut core, ToTask::PrepareExit { migration: None }).expect("noted");
    assert_eq!(control_messages(&take_written(&mut core)), []);
}
