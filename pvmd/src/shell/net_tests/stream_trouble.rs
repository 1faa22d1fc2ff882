//! Trouble of one stream concerns that stream alone. What no daemon sends ends the session.

use super::{
    Daemon, DaemonInput, STEP_TIMEOUT, commit_message, connected_pair, host, link_frame,
    wait_for_frame,
};
use crate::shell::net::SessionChange;
use crate::shell::session::{StreamPurpose, open_announcement, open_bidirectional};
use crate::shell::session_input::{BulkContent, SessionContext};
use pvmd_machine::pair_streams::LaneId;
use quinn::{Connection, VarInt};
use sempa_proto::MigrationId;
use sempa_proto::frame::{FrameKind, encode_control, encode_frame};
use std::time::Duration;
use tokio::time::timeout;

const LEASE: Duration = Duration::from_secs(10);
const RESET_CODE: VarInt = VarInt::from_u32(1);
/// A frame whose kind does not exist.
const INVALID_FRAME: [u8; 5] = [1, 0, 0, 0, 99];

/// Returns the session of `daemon` with host 1.
async fn session_with_master(daemon: &mut Daemon) -> (SessionContext, Connection) {
    let pending_session = daemon.net.await_session(host(1));
    pending_session.wait_for_session().await.expect("it is up")
}

/// Checks that `master` serves new streams of this session and receives its control messages. When
/// the function returns, `master` has accepted all streams that were opened before.
async fn assert_session_is_up(
    master: &mut Daemon,
    (context, session): &(SessionContext, Connection),
) {
    let purpose = StreamPurpose::Images(MigrationId(900));
    let announcement = open_announcement(context, session, purpose);
    let announcement = announcement.await.expect("a stream");
    let purpose = StreamPurpose::BulkFallback(MigrationId(900), BulkContent::Images);
    let fallback = open_bidirectional(context, session, purpose);
    let (_send_stream, mut receive_stream) = fallback.await.expect("a stream");
    let mut reply = [0; 1];
    let refusals = async {
        announcement.stopped().await.expect("the session is up");
        receive_stream
            .read_exact(&mut reply)
            .await
            .expect_err("it is refused");
    };
    tokio::select! {
        refusals = timeout(STEP_TIMEOUT, refusals) => refusals.expect("in time"),
        input = master.wait_for_input() => panic!("{input:?}"),
    }
}

/// A daemon that gives up a transfer may reset or end its stream before the peer has received the
/// whole hello.
#[tokio::test(flavor = "multi_thread")]
async fn streams_given_up_before_hello_leave_session_up() {
    let (mut master, mut daemon2) = connected_pair("given-up", LEASE).await;
    let session = session_with_master(&mut daemon2).await;
    let hello = session
        .0
        .encode_hello(StreamPurpose::Images(MigrationId(7)));
    let hello = hello.expect("a short frame");
    for round in 0..400 {
        // Bidirectional streams in every second round.
        let mut stream = if round % 2 == 0 {
            session.1.open_uni().await.expect("a stream")
        } else {
            session.1.open_bi().await.expect("a stream").0
        };
        let hello_part = &hello[..round % hello.len()];
        match round % 5 {
            0 => {}
            1 => stream.write_all(hello_part).await.expect("written"),
            2 => {
                stream.write_all(hello_part).await.expect("written");
                let _ = stream.finish();
            }
            3 => {
                stream.write_all(hello_part).await.expect("written");
                let _ = stream.reset(RESET_CODE);
            }
            _ => {
                let _ = stream.reset(RESET_CODE);
            }
        }
    }
    assert_session_is_up(&mut master, &session).await;
    daemon2.net.send_control(host(1), &commit_message(3));
    let input = timeout(STEP_TIMEOUT, master.wait_for_input()).await;
    assert!(
        matches!(&input, Ok(DaemonInput::Control(m)) if *m == commit_message(3)),
        "{input:?}"
    );
}

/// The hello of a stream may be delayed for as long as the session lives. No other stream waits for
/// it.
#[tokio::test(flavor = "multi_thread")]
async fn silent_streams_delay_no_other_stream() {
    let (mut master, mut daemon2) = connected_pair("silent", LEASE).await;
    let session = session_with_master(&mut daemon2).await;
    let hello = session
        .0
        .encode_hello(StreamPurpose::PairStream(LaneId(77)));
    let hello = hello.expect("a short frame");
    let (first_part, last_part) = hello.split_at(3);
    let mut silent_streams = Vec::new();
    for _ in 0..20 {
        let mut stream = session.1.open_uni().await.expect("a stream");
        stream.write_all(first_part).await.expect("written");
        silent_streams.push(stream);
        let (mut stream, _) = session.1.open_bi().await.expect("a stream");
        stream.write_all(first_part).await.expect("written");
        silent_streams.push(stream);
    }
    assert_session_is_up(&mut master, &session).await;
    let mut late_stream = silent_streams.swap_remove(0);
    late_stream.write_all(last_part).await.expect("written");
    let frame = encode_frame(FrameKind::Link, &[&link_frame(1, 1, 5, 8)]);
    late_stream.write_all(&frame).await.expect("written");
    assert_eq!(wait_for_frame(&mut master).await.1, 5);
}

/// What a new stream of the session carries, and how the stream ends.
enum Violation {
    /// A unidirectional stream with these bytes.
    Uni(Vec<u8>),
    /// A bidirectional stream with these bytes.
    Bi(Vec<u8>),
    /// A stream of the data channel that is reset after its hello.
    ResetDataStream,
}

/// No daemon sends any of this, so the session ends, and the hosts connect again.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_streams_end_the_session() {
    let (mut master, mut daemon2) = connected_pair("invalid", LEASE).await;
    let (context, _) = session_with_master(&mut daemon2).await;
    let hello = |purpose| {
        context
            .encode_hello(purpose)
            .expect("a short frame")
            .to_vec()
    };
    let lane = StreamPurpose::PairStream(LaneId(77));
    let foreign_context = SessionContext {
        vm: "other".into(),
        ..context.clone()
    };
    let foreign_hello = foreign_context.encode_hello(lane).expect("a short frame");
    let violations = [
        Violation::Uni(INVALID_FRAME.to_vec()),
        Violation::Uni(encode_control(&"no hello").expect("short").to_vec()),
        Violation::Uni(foreign_hello.to_vec()),
        Violation::Uni(hello(StreamPurpose::Data)),
        Violation::Uni(hello(StreamPurpose::Control)),
        Violation::Uni([hello(lane), INVALID_FRAME.to_vec()].concat()),
        Violation::Bi(hello(lane)),
        Violation::ResetDataStream,
    ];
    for (index, violation) in violations.into_iter().enumerate() {
        let (context, session) = session_with_master(&mut daemon2).await;
        let (bytes, is_reset, mut stream) = match violation {
            Violation::Uni(bytes) => (bytes, false, session.open_uni().await.expect("a stream")),
            Violation::Bi(bytes) => (bytes, false, session.open_bi().await.expect("a stream").0),
            Violation::ResetDataStream => {
                let stream = session.open_uni().await.expect("a stream");
                let hello = context.encode_hello(lane).expect("a short frame");
                let frame = encode_frame(FrameKind::Link, &[&link_frame(1, 1, 5, 8)]);
                ([hello, frame].concat(), true, stream)
            }
        };
        stream.write_all(&bytes).await.expect("written");
        if is_reset {
            // The frame proves that the hello has arrived before the reset.
            assert_eq!(wait_for_frame(&mut master).await.1, 5);
            let _ = stream.reset(RESET_CODE);
        }
        let input = timeout(STEP_TIMEOUT, master.wait_for_input()).await;
        assert!(
            matches!(&input, Ok(DaemonInput::SessionChange(SessionChange::Lost(lost_host, _))) if *lost_host == host(2)),
            "{index}: {input:?}"
        );
        let input = timeout(STEP_TIMEOUT, daemon2.wait_for_input()).await;
        assert!(
            matches!(
                &input,
                Ok(DaemonInput::SessionChange(SessionChange::Lost(..)))
            ),
            "{index}: {input:?}"
        );
        // The daemon's loop does this once per second.
        master.net.maintain_sessions();
        daemon2.net.maintain_sessions();
        tokio::join!(
            master.wait_for_session(host(2)),
            daemon2.wait_for_session(host(1))
        );
    }
}
