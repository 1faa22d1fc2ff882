//! Tests of the runtime's state without I/O: limits, restarts, handoffs, and operation without a
//! connection.

use super::*;
use sempa_proto::frame::{FrameDecoder, encode_link};
use sempa_proto::link::LinkState;
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::RestartGroup;
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::task::{ProcessHandoff, RestartInfo, RmServices};

const ME: Tid = Tid::from_raw(0x40001);
const PEER: Tid = Tid::from_raw(0x40002);

fn core() -> Core {
    Core::new(&welcome())
}

fn welcome() -> Welcome {
    Welcome {
        tid: ME,
        parent: Tid::NONE,
        host: HostId::MASTER,
        addresses: vec![],
        rm: None,
        output: Sink::default(),
        trace: Sink::default(),
        dsig: DSIG_X86_64,
        spawned: false,
        tracer: None,
        restart: None,
        handoff: None,
    }
}

fn message(dst: Tid, tag: i32, body: Bytes) -> Message {
    Message {
        src: ME,
        dst,
        ctx: CTX_BASE,
        tag,
        wid: 0,
        enc: ENC_XDR,
        body,
    }
}

fn receive_control(core: &mut Core, control: ToTask) -> Result<(), String> {
    core.handle_control(Micros(0), control)
}

fn quiesced_core() -> Core {
    let mut core = core();
    receive_control(
        &mut core,
        ToTask::Quiesce {
            migration: MigrationId(1),
            tokens: vec![],
        },
    )
    .expect("lets go");
    core.outbox.clear();
    core.mark_quiesced();
    core
}

/// Above the limit of deferred notifications the oldest is delivered early; none is lost.
#[test]
fn deferred_notifications_are_bounded_without_loss() {
    let mut core = core();
    for tag in 0..=DEFERRED_DELIVERIES_MAX as i32 {
        let message = message(ME, tag, Bytes::new());
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

/// The number of remembered links to ended tasks is limited.
#[test]
fn remembered_ended_links_are_bounded() {
    let mut core = core();
    for local in 2..(ENDED_LINKS_MAX as u32 + 100) {
        let tid = Tid::task(HostId::MASTER, local).expect("a tid");
        receive_control(&mut core, ToTask::PeerGone { tid }).expect("noted");
    }
    assert_eq!(core.links.len(), ENDED_LINKS_MAX);
}

/// The control frames queued during a migration are limited in size.
#[test]
fn control_queue_during_migration_is_bounded() {
    let mut core = quiesced_core();
    let order = message(HostId::MASTER.daemon_tid(), 1, vec![0; 32 << 20].into());
    let taken = (0..100)
        .take_while(|_| core.send_to_daemon(order.clone()).is_ok())
        .count();
    assert_eq!(taken, DEFERRED_CONTROL_BYTES_MAX / (32 << 20) - 1);
    assert_eq!(core.send_to_daemon(order), Err(PvmError::OutOfRes));
}

/// Above [`REQUESTS_OPEN_MAX`] open requests a further request fails with `OutOfRes`.
#[test]
fn open_requests_are_bounded() {
    let mut core = core();
    for _ in 0..REQUESTS_OPEN_MAX {
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

/// Links that wait for space in the outbox transmit in turn.
#[test]
fn links_share_full_outbox_in_turn() {
    let mut core = core();
    let others = [PEER, Tid::from_raw(0x40003)];
    for peer in others {
        core.send(
            Micros(0),
            message(peer, 1, vec![0; 2 * BACKLOG_BYTES_MAX].into()),
        )
        .expect("queued");
    }
    assert!(core.outbox.backlog_bytes() < BACKLOG_BYTES_MAX + (70 << 10));
    assert!(others.iter().all(|peer| core.waits_for_outbox(*peer)));
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
        core.outbox.remove_written(bytes.len());
        core.pump(Micros(0));
    }
    assert!(core.all_transmitted());
    let mut order = Vec::new();
    while let Some(frame) = decoder.next_frame().expect("good") {
        order.push(frame.decode_link().expect("a link frame").dst);
    }
    let second = order
        .iter()
        .position(|dst| *dst == others[1])
        .expect("sent");
    assert!(
        order[second..].contains(&others[0]),
        "the second did not wait until the first was done"
    );
}

/// A quiesce request to a quiesced task is a protocol error.
#[test]
fn second_quiesce_request_is_an_error() {
    let mut core = quiesced_core();
    assert!(
        receive_control(
            &mut core,
            ToTask::Quiesce {
                migration: MigrationId(2),
                tokens: vec![]
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
    assert!(core.outbox.is_empty() && core.next_timer().is_none() && !core.all_transmitted());
}

/// An acknowledgement that arrives after the end of its sender does not make the peer count as
/// alive.
#[test]
fn late_ack_does_not_revive_ended_peer() {
    let mut core = core();
    core.send(Micros(0), message(PEER, 1, Bytes::new()))
        .expect("sent");
    receive_control(&mut core, ToTask::PeerGone { tid: PEER }).expect("noted");
    let late = LinkFrame {
        src: PEER,
        dst: ME,
        kind: LinkKind::Ack { resync: false },
        seq: 0,
        ack: 2,
        incarnation: 0,
        payload: Bytes::new(),
    };
    let mut decoder = FrameDecoder::new();
    decoder.push(&encode_link(&late));
    let frame = decoder.next_frame().expect("good").expect("whole");
    core.handle_frame(Micros(0), frame, &mut PendingFds::default())
        .expect("ignored");
    assert!(core.is_gone(PEER));
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
        core.outbox.remove_written(bytes.len());
    }
    std::iter::from_fn(|| decoder.next_frame().expect("good")).collect()
}

fn links_of(frames: Vec<Frame>) -> Vec<LinkFrame> {
    let links = frames
        .into_iter()
        .filter(|frame| frame.kind == FrameKind::Link);
    links
        .map(|frame| frame.decode_link().expect("a link frame"))
        .collect()
}

fn requests_of(frames: Vec<Frame>) -> Vec<RequestId> {
    let controls = frames
        .into_iter()
        .filter(|frame| frame.kind == FrameKind::Control);
    let ids = controls.map(
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
/// `again` lists the requests to repeat. Returns the frames that the restarted process sends.
fn restart(core: &mut Core, rm: Option<RmInfo>, again: Vec<RequestId>) -> Vec<Frame> {
    receive_control(
        core,
        ToTask::Quiesce {
            migration: MigrationId(1),
            tokens: vec![],
        },
    )
    .expect("lets go");
    core.outbox.clear();
    core.mark_quiesced();
    let timeline = RestartGroup {
        incarnation: 3,
        members: vec![(ME, 0), (PEER, 0)],
        same_vm: true,
    };
    core.resume(
        Micros(0),
        &Welcome {
            rm,
            restart: Some(RestartInfo {
                group: timeline,
                requests_to_repeat: again,
            }),
            ..welcome()
        },
    );
    take_written(core)
}

/// A restarted task repeats the requests that its daemon lists as lost. The repeated requests keep
/// their ids.
#[test]
fn restarted_task_repeats_unanswered_requests() {
    let mut core = core();
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
    let frames = restart(&mut core, None, vec![ids[0], ids[1], ids[3], RequestId(77)]);
    // The second request has its reply, and the reply to the third is still at the daemon.
    assert_eq!(requests_of(frames), [ids[0], ids[3]]);
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
    for (before, after, deaths) in [
        (rm(7), rm(7), 1),
        (rm(7), rm(8), 1),
        (rm(7), None, 1),
        (None, rm(8), 0),
        (None, None, 0),
    ] {
        let mut core = Core::new(&Welcome {
            rm: before,
            ..welcome()
        });
        restart(&mut core, after, vec![]);
        assert_eq!((core.rm_deaths(), core.rm()), (deaths, after));
    }
}

/// After a restart, links between restarted tasks keep their sequence numbers; all other links
/// start at 1.
#[test]
fn restart_keeps_links_between_members_only() {
    const OTHER: Tid = Tid::from_raw(0x40003);
    let (mut core, now) = (core(), Micros(0));
    for peer in [PEER, OTHER] {
        core.send(now, message(peer, 1, Bytes::new()))
            .expect("sent");
        let mut word = message(ME, 2, Bytes::new());
        word.src = peer;
        let payload = Bytes::from(word.encode_head().as_ref().to_vec());
        receive_frame(
            &mut core,
            &LinkFrame {
                src: peer,
                dst: ME,
                kind: LinkKind::Data { last: true },
                seq: 1,
                ack: 1,
                incarnation: 0,
                payload,
            },
        );
    }
    assert_eq!(core.inbox.len(), 2);
    let links = links_of(restart(&mut core, None, vec![]));
    let said: Vec<_> = links
        .iter()
        .map(|f| (f.dst, f.kind, f.seq, f.ack, f.incarnation))
        .collect();
    // PEER, which restarted too, is probed. OTHER has most probably received everything.
    assert!(
        said.contains(&(PEER, LinkKind::Probe, 2, 2, 3)) && said.iter().all(|said| said.0 == PEER),
        "{said:?}"
    );
    for (peer, seq, ack) in [(PEER, 2, 2), (OTHER, 1, 1), (Tid::from_raw(0x40004), 1, 1)] {
        core.send(now, message(peer, 1, Bytes::new()))
            .expect("sent");
        let links = links_of(take_written(&mut core));
        let said: Vec<_> = links
            .iter()
            .map(|f| (f.dst, f.kind, f.seq, f.ack, f.incarnation))
            .collect();
        assert_eq!(said, [(peer, LinkKind::Data { last: true }, seq, ack, 3)]);
    }
}

/// Offers of direct routes make both ends use the later incarnation before the route is
/// established.
#[test]
fn direct_offer_aligns_incarnations() {
    let offer = |line| {
        let word = RouteMsg::DirectOffer {
            id: OfferId(1),
            addresses: vec![],
            fingerprint: [7; 32],
            incarnation: line,
        };
        encode_control(&ToTask::Route {
            from: PEER,
            same_host: false,
            message: word,
        })
        .expect("short")
    };
    let hear = |core: &mut Core, word: Bytes| {
        let mut decoder = FrameDecoder::new();
        decoder.push(&word);
        let frame = decoder.next_frame().expect("good").expect("whole");
        core.handle_frame(Micros(0), frame, &mut PendingFds::default())
            .expect("taken");
    };
    // A peer that did not restart sends its queued fragments on the new incarnation.
    let mut core = core();
    core.send(Micros(0), message(PEER, 1, Bytes::new()))
        .expect("sent");
    assert_eq!(core.incarnation_with(PEER), 0);
    hear(&mut core, offer(3));
    assert_eq!(core.incarnation_with(PEER), 3);
    let last = links_of(take_written(&mut core))
        .pop()
        .expect("transmitted");
    assert_eq!(
        (last.kind, last.seq, last.incarnation),
        (LinkKind::Data { last: true }, 1, 3)
    );
    // A restarted task keeps its own incarnation and announces it.
    restart(&mut core, None, vec![]);
    hear(&mut core, offer(2));
    assert_eq!(core.incarnation_with(PEER), 3);
    core.request_route(Micros(0), Tid::from_raw(0x40003));
    let lines = take_written(&mut core)
        .into_iter()
        .filter(|frame| frame.kind == FrameKind::Control);
    let lines =
        lines.filter_map(
            |frame| match frame.decode_control::<ToDaemon>().expect("a word") {
                ToDaemon::Route {
                    message:
                        RouteMsg::DirectOffer {
                            incarnation: line, ..
                        },
                    ..
                } => Some(line),
                _ => None,
            },
        );
    assert_eq!(lines.collect::<Vec<u16>>(), [3]);
}

fn data_frame(src: Tid, dst: Tid, seq: u64, tag: i32) -> LinkFrame {
    let word = Message {
        src,
        ..message(dst, tag, Bytes::new())
    };
    let payload = Bytes::from(word.encode_head().as_ref().to_vec());
    LinkFrame {
        src,
        dst,
        kind: LinkKind::Data { last: true },
        seq,
        ack: 1,
        incarnation: 0,
        payload,
    }
}

fn controls_of(frames: &[Frame]) -> Vec<ToDaemon> {
    let words = frames
        .iter()
        .filter(|frame| frame.kind == FrameKind::Control);
    words
        .map(|frame| frame.decode_control().expect("a word"))
        .collect()
}

const MIGRATION: MigrationId = MigrationId(7);

/// A successor process continues the links of its predecessor and uses other request ids.
#[test]
fn successor_continues_links_with_new_request_ids() {
    let talk = LinkState {
        peer: PEER,
        incarnation: 2,
        expected_seq: 5,
        first_seq: 3,
        end_seq: 4,
        peer_gone: false,
    };
    let successor = ProcessHandoff {
        incarnation: 2,
        restart_count: 3,
        links: vec![talk],
    };
    let mut core = Core::new(&Welcome {
        handoff: Some(Box::new(successor)),
        ..welcome()
    });
    assert!(core.send_request(Request::Config).expect("asked").0 > 3 << 40);
    // A new message is sent only after the predecessor's unacknowledged ones.
    core.send(Micros(0), message(PEER, 9, Bytes::new()))
        .expect("sent");
    assert!(
        links_of(take_written(&mut core))
            .iter()
            .all(|frame| !matches!(frame.kind, LinkKind::Data { .. }))
    );
    receive_frame(
        &mut core,
        &LinkFrame {
            incarnation: 2,
            ..data_frame(ME, PEER, 3, 8)
        },
    );
    let sent = links_of(take_written(&mut core));
    let sent = sent
        .iter()
        .filter(|frame| matches!(frame.kind, LinkKind::Data { .. }));
    assert_eq!(
        sent.map(|frame| (frame.seq, frame.incarnation, frame.ack))
            .collect::<Vec<_>>(),
        [(3, 2, 5), (4, 2, 5)]
    );
    receive_frame(
        &mut core,
        &LinkFrame {
            incarnation: 2,
            ..data_frame(PEER, ME, 5, 1)
        },
    );
    assert_eq!(core.inbox.len(), 1);
}

/// Before a requested exit the task hands off link states, deferred notifications and
/// unacknowledged fragments.
#[test]
fn handoff_contains_links_and_unacked_fragments() {
    let mut core = core();
    receive_frame(&mut core, &data_frame(PEER, ME, 1, 2));
    core.send(Micros(0), message(PEER, 3, Bytes::new()))
        .expect("sent");
    let note = message(ME, 4, Bytes::new());
    receive_control(
        &mut core,
        ToTask::Deliver {
            message: note,
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
    let said = take_written(&mut core);
    let [
        ToDaemon::Handoff {
            migration: MIGRATION,
            incarnation: 0,
            links: talks,
            deferred_notifications: later,
        },
        ToDaemon::ReadyToExit {
            migration: MIGRATION,
        },
    ] = &controls_of(&said)[..]
    else {
        panic!("{said:?}")
    };
    assert_eq!(
        talks[..],
        [LinkState {
            peer: PEER,
            incarnation: 0,
            expected_seq: 2,
            first_seq: 1,
            end_seq: 1,
            peer_gone: false
        }]
    );
    assert_eq!((later.len(), later[0].0.end_seq), (1, 9));
    let again = links_of(said);
    assert!(
        again
            .iter()
            .any(|frame| frame.seq == 1 && matches!(frame.kind, LinkKind::Data { .. })),
        "{again:?}"
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
    let mut count = 0;
    while core.outbox.backlog_bytes() > 0 {
        count += links_of(take_written(&mut core)).len();
        core.pump(Micros(0));
    }
    assert_eq!(
        count,
        2 * sempa_proto::link::WINDOW_BYTES_MAX / sempa_proto::link::FRAGMENT_BYTES_MAX + 1
    );
    receive_control(&mut core, ToTask::PrepareExit { migration: None }).expect("noted");
    assert_eq!(
        controls_of(&take_written(&mut core)),
        [ToDaemon::ExitCancelled {
            migration: MIGRATION
        }]
    );
    receive_frame(&mut core, &data_frame(PEER, ME, 2, 2));
    assert_eq!(core.inbox.len(), 2);
    assert!(core.begin_exit(), "its daemon may wait for this still");
}

/// An exiting task hands off its unread messages, and the next process receives them first.
#[test]
fn exiting_task_hands_off_unread_messages() {
    let mut core = core();
    receive_control(
        &mut core,
        ToTask::PrepareExit {
            migration: Some(MIGRATION),
        },
    )
    .expect("noted");
    receive_control(&mut core, ToTask::PrepareExit { migration: None }).expect("noted");
    take_written(&mut core);
    receive_frame(&mut core, &data_frame(PEER, ME, 1, 2));
    let note = message(ME, 4, Bytes::new());
    receive_control(
        &mut core,
        ToTask::Deliver {
            message: note,
            deliver_after: Some(SendWatermark {
                peer: PEER,
                end_seq: 9,
            }),
        },
    )
    .expect("kept");
    assert!(core.begin_exit(), "it was late");
    receive_frame(&mut core, &data_frame(PEER, ME, 2, 2));
    receive_control(
        &mut core,
        ToTask::PrepareExit {
            migration: Some(MIGRATION),
        },
    )
    .expect("noted");
    let said = controls_of(&take_written(&mut core));
    let Some(ToDaemon::Handoff {
        links: talks,
        deferred_notifications: later,
        ..
    }) = said.first()
    else {
        panic!("{said:?}")
    };
    assert_eq!((talks[0].expected_seq, core.inbox.len()), (3, 0));
    assert_eq!(
        later
            .iter()
            .map(|(mark, _)| mark.end_seq)
            .collect::<Vec<_>>(),
        [0, 0, 9]
    );
    // The next process receives these messages before all others.
    let successor = ProcessHandoff {
        incarnation: 0,
        restart_count: 1,
        links: talks.clone(),
    };
    let mut next = Core::new(&Welcome {
        handoff: Some(Box::new(successor)),
        ..welcome()
    });
    for (mark, message) in later {
        receive_control(
            &mut next,
            ToTask::Deliver {
                message: message.clone(),
                deliver_after: Some(*mark),
            },
        )
        .expect("taken");
    }
    receive_frame(&mut next, &data_frame(PEER, ME, 3, 2));
    let bodies: Vec<_> = next.inbox.iter().map(|message| message.src).collect();
    assert_eq!(
        bodies, [PEER; 3],
        "the notification waits for the last message before it"
    );
}

/// Withdrawing the exit request does not stop a task that is already exiting.
#[test]
fn exit_in_progress_cannot_be_withdrawn() {
    let mut core = core();
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
    assert_eq!(controls_of(&take_written(&mut core)), []);
}
