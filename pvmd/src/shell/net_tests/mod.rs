//! Tests of the sessions of two or three daemons on loopback: how they are established, and how
//! they transfer data and images.

mod image_transfers;
mod stream_trouble;

use super::bulk_fallback::BulkFallbacks;
use super::images::ImageTransfers;
use super::input::{INPUT_QUEUE_MAX, Input};
use super::net::{Net, SessionChange, bind_udp};
use super::pki::{Authority, HostCredentials};
use super::session_input::NetInput;
use super::transfer_counters::TransferCounters;
use bytes::Bytes;
use pvmd_machine::Event;
use pvmd_machine::pair_streams::LANES_MAX;
use quinn::crypto::rustls::QuicClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::link::{LinkFrame, LinkKind};
use sempa_proto::runtime_paths::RuntimePaths;
use sempa_proto::{Epoch, HostId, Tid};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Time limit of each step. The limit is much longer than a step needs, because machines may be
/// loaded.
const STEP_TIMEOUT: Duration = Duration::from_secs(30);

struct Daemon {
    net: Net,
    images: ImageTransfers,
    fallbacks: BulkFallbacks,
    input_queue: mpsc::Receiver<Input>,
    own_host: HostId,
    dir: PathBuf,
    /// Host and number of the session that delivered data last.
    last_session: (HostId, u64),
}

fn host(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn create_test_dir(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("pvmd-net-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a scratch directory");
    dir
}

impl Daemon {
    fn start(
        test_name: &str,
        own_host: u16,
        credentials: &HostCredentials,
        lease: Duration,
    ) -> Self {
        let dir = create_test_dir(&format!("{test_name}-{own_host}"));
        let tmp_dir = dir.to_string_lossy().into_owned();
        let paths = RuntimePaths::from_env(0, |name| (name == "PVM_TMP").then(|| tmp_dir.clone()))
            .expect("a good name");
        std::fs::create_dir_all(paths.dir()).expect("writable");
        let (input_sender, input_queue) = mpsc::channel(INPUT_QUEUE_MAX);
        let socket = bind_udp(0).expect("a port");
        let net = Net::start(
            socket,
            credentials,
            ("pvm", host(own_host)),
            lease,
            input_sender.clone(),
        )
        .expect("TLS");
        let fallbacks = BulkFallbacks::new();
        Self {
            net,
            images: ImageTransfers::new(
                paths,
                input_sender,
                Arc::default(),
                fallbacks.clone(),
                TransferCounters::default(),
            ),
            fallbacks,
            input_queue,
            own_host: host(own_host),
            dir,
            last_session: (host(own_host), 0),
        }
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.net.port().expect("bound")))
    }

    /// Waits for the next input or session change that the daemon's loop would handle.
    async fn wait_for_input(&mut self) -> DaemonInput {
        loop {
            let (host, number) = self.last_session;
            if let Some(data_message) = self.net.next_data(host, number) {
                return DaemonInput::Data(data_message);
            }
            let input = self
                .input_queue
                .recv()
                .await
                .expect("the net holds the other end");
            match input {
                Input::Event(event) => return DaemonInput::Event(event),
                Input::Net(NetInput::Control { message, .. }) => {
                    return DaemonInput::Control(message);
                }
                Input::Net(NetInput::Data {
                    host,
                    session_number: number,
                    item: data_item,
                }) => {
                    self.net.accept_data(host, number, data_item);
                    self.last_session = (host, number);
                }
                Input::Net(NetInput::ImagesAnnounced(announcement)) => {
                    self.images.on_announcement(announcement);
                }
                Input::Net(NetInput::FallbackStream {
                    host,
                    migration,
                    content,
                    streams,
                }) => {
                    self.fallbacks.on_stream(host, migration, content, streams);
                }
                Input::Net(input) => {
                    if let Some(change) = self.net.handle_input(input).pop() {
                        return DaemonInput::SessionChange(change);
                    }
                }
                Input::TaskConnected(_) => unreachable!("nobody listens for tasks here"),
            }
        }
    }

    /// Waits until there is a session with `other_host`. Ignores refused connections, and panics on
    /// other inputs.
    async fn wait_for_session(&mut self, other_host: HostId) {
        loop {
            match timeout(STEP_TIMEOUT, self.wait_for_input()).await {
                Ok(DaemonInput::SessionChange(SessionChange::Connected(host)))
                    if host == other_host =>
                {
                    return;
                }
                Ok(DaemonInput::Event(Event::UnauthenticatedPeer { .. })) => {}
                unexpected_input => panic!(
                    "{} waited for a session with {other_host}, saw {unexpected_input:?}",
                    self.own_host
                ),
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[derive(Debug)]
enum DaemonInput {
    SessionChange(SessionChange),
    Control(HostMsg),
    Data(DataMsg),
    Event(Event),
}

/// Starts the master and host 2 of one virtual machine and waits for their session.
async fn connected_pair(test_name: &str, lease: Duration) -> (Daemon, Daemon) {
    let authority = Authority::new("pvm").expect("a key");
    let mut daemon1 = Daemon::start(
        test_name,
        1,
        &authority.issue(host(1)).expect("a key"),
        lease,
    );
    let mut daemon2 = Daemon::start(
        test_name,
        2,
        &authority.issue(host(2)).expect("a key"),
        lease,
    );
    daemon1
        .net
        .keep_connected(daemon2.own_host, vec![daemon2.address()]);
    daemon2
        .net
        .keep_connected(daemon1.own_host, vec![daemon1.address()]);
    tokio::join!(
        daemon1.wait_for_session(host(2)),
        daemon2.wait_for_session(host(1))
    );
    (daemon1, daemon2)
}

fn commit_message(epoch: u64) -> HostMsg {
    HostMsg::TableCommitted {
        epoch: Epoch(epoch),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_queued_before_session_all_arrive() {
    let authority = Authority::new("pvm").expect("a key");
    let mut daemon1 = Daemon::start(
        "early",
        1,
        &authority.issue(host(1)).expect("a key"),
        Duration::from_secs(10),
    );
    let mut daemon2 = Daemon::start(
        "early",
        2,
        &authority.issue(host(2)).expect("a key"),
        Duration::from_secs(10),
    );
    // The total size of the frames exceeds the windows of many links.
    let (frame, frame_count) = (Bytes::from(vec![7; 64 << 10]), 1600);
    for _ in 0..frame_count {
        daemon1
            .net
            .send_data(host(2), DataMsg::Frame(frame.clone()));
    }
    daemon1
        .net
        .keep_connected(daemon2.own_host, vec![daemon2.address()]);
    daemon2
        .net
        .keep_connected(daemon1.own_host, vec![daemon1.address()]);
    tokio::join!(
        daemon1.wait_for_session(host(2)),
        daemon2.wait_for_session(host(1))
    );
    for n in 0..frame_count {
        match timeout(STEP_TIMEOUT, daemon2.wait_for_input()).await {
            Ok(DaemonInput::Data(DataMsg::Frame(received_frame))) if received_frame == frame => {}
            unexpected_input => {
                panic!("after {n} of {frame_count} frames came {unexpected_input:?}")
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mutual_connect_yields_one_ordered_session() {
    let (mut daemon1, mut daemon2) = connected_pair("talk", Duration::from_secs(10)).await;
    for n in 0..2000 {
        daemon1
            .net
            .send_control(daemon2.own_host, &commit_message(n));
        daemon2.net.send_data(
            daemon1.own_host,
            DataMsg::Frame(Bytes::from(vec![n as u8; 5000])),
        );
    }
    for n in 0..2000 {
        match timeout(STEP_TIMEOUT, daemon2.wait_for_input())
            .await
            .expect("in time")
        {
            DaemonInput::Control(message) => assert_eq!(message, commit_message(n)),
            unexpected_input => panic!("{unexpected_input:?}"),
        }
        match timeout(STEP_TIMEOUT, daemon1.wait_for_input())
            .await
            .expect("in time")
        {
            DaemonInput::Data(DataMsg::Frame(body)) => assert_eq!(body, vec![n as u8; 5000]),
            unexpected_input => panic!("{unexpected_input:?}"),
        }
    }
}

/// Builds a frame from a task of host 1 to a task of host 2.
fn link_frame(src: u32, dst: u32, seq: u64, bytes: usize) -> Bytes {
    let (src, dst) = (
        Tid::for_task(host(1), src).expect("a task"),
        Tid::for_task(host(2), dst).expect("a task"),
    );
    let kind = LinkKind::Data { is_last: true };
    let frame = LinkFrame {
        src,
        dst,
        kind,
        seq,
        ack: 1,
        incarnation: 0,
        payload: Bytes::new(),
    };
    [&frame.encode_head()[..], &vec![7; bytes]].concat().into()
}

/// Waits for the next link frame. Returns its source and destination and its sequence number.
async fn wait_for_frame(daemon: &mut Daemon) -> ((Tid, Tid), u64) {
    match timeout(STEP_TIMEOUT, daemon.wait_for_input()).await {
        Ok(DaemonInput::Data(DataMsg::Frame(body))) => {
            let frame = LinkFrame::decode(body).expect("a link frame");
            ((frame.src, frame.dst), frame.seq)
        }
        unexpected_input => panic!("instead of a link frame: {unexpected_input:?}"),
    }
}

// The test uses one thread, as the daemon does. Therefore all frames are queued before the first
// frame is sent.
#[tokio::test]
async fn busy_pair_does_not_delay_another_pair() {
    const WARM_UP_FRAMES: u64 = 20;
    // Number of frames of the busy pair; their total size is much more than can be in flight.
    const BACKLOG_FRAMES: u64 = 2000;
    let (mut daemon1, mut daemon2) = connected_pair("lanes", Duration::from_secs(10)).await;
    for seq in 0..WARM_UP_FRAMES {
        daemon1
            .net
            .send_data(daemon2.own_host, DataMsg::Frame(link_frame(1, 1, seq, 100)));
        daemon1
            .net
            .send_data(daemon2.own_host, DataMsg::Frame(link_frame(2, 2, seq, 100)));
    }
    for _ in 0..2 * WARM_UP_FRAMES {
        wait_for_frame(&mut daemon2).await;
    }
    for seq in 0..BACKLOG_FRAMES {
        daemon1.net.send_data(
            daemon2.own_host,
            DataMsg::Frame(link_frame(1, 1, seq, 60 << 10)),
        );
    }
    daemon1.net.send_data(
        daemon2.own_host,
        DataMsg::Frame(link_frame(2, 2, WARM_UP_FRAMES, 8)),
    );
    let (mut overtaken_frame_count, mut received_backlog_count) = (0, 0);
    while received_backlog_count < BACKLOG_FRAMES {
        let (frame_pair, seq) = wait_for_frame(&mut daemon2).await;
        if seq == WARM_UP_FRAMES && frame_pair.0 == Tid::for_task(host(1), 2).expect("a task") {
            overtaken_frame_count = BACKLOG_FRAMES - received_backlog_count;
        } else {
            assert_eq!(
                seq, received_backlog_count,
                "a frame of one pair has overtaken another one"
            );
            received_backlog_count += 1;
        }
    }
    assert!(
        overtaken_frame_count > 0,
        "the one frame came behind all {BACKLOG_FRAMES} that another pair had said before"
    );
}

// The test uses one thread, as the daemon does. Therefore all frames are queued before the first
// frame is sent.
/// A small frame of one pair does not wait for the queued frames of a hundred busy pairs.
#[tokio::test]
async fn frame_overtakes_backlog_of_hundred_pairs() {
    const WARM_UP_FRAMES: u64 = 10;
    const BUSY_PAIRS: u32 = 100;
    // Number of frames per pair. The total size of the frames of all pairs is much more than can be
    // in flight.
    const BACKLOG_FRAMES: u64 = 16;
    let (mut daemon1, mut daemon2) = connected_pair("hundred", Duration::from_secs(10)).await;
    let last_pair = BUSY_PAIRS + 1;
    for seq in 0..WARM_UP_FRAMES {
        (1..=last_pair).for_each(|pair| {
            daemon1.net.send_data(
                daemon2.own_host,
                DataMsg::Frame(link_frame(pair, pair, seq, 8)),
            )
        });
    }
    for _ in 0..WARM_UP_FRAMES * u64::from(last_pair) {
        wait_for_frame(&mut daemon2).await;
    }
    for seq in WARM_UP_FRAMES..WARM_UP_FRAMES + BACKLOG_FRAMES {
        (1..last_pair).for_each(|pair| {
            daemon1.net.send_data(
                daemon2.own_host,
                DataMsg::Frame(link_frame(pair, pair, seq, 60 << 10)),
            )
        });
    }
    let started_at = Instant::now();
    daemon1.net.send_data(
        daemon2.own_host,
        DataMsg::Frame(link_frame(last_pair, last_pair, WARM_UP_FRAMES, 8)),
    );
    let (src, backlog_frame_count) = (
        Tid::for_task(host(1), last_pair).expect("a task"),
        BACKLOG_FRAMES * u64::from(BUSY_PAIRS),
    );
    let mut earlier_frame_count = 0;
    while wait_for_frame(&mut daemon2).await.0.0 != src {
        earlier_frame_count += 1;
    }
    println!(
        "{earlier_frame_count} of {backlog_frame_count} frames came before the word, which took {} ms",
        started_at.elapsed().as_millis()
    );
    assert!(
        earlier_frame_count < backlog_frame_count / 2,
        "{earlier_frame_count} of {backlog_frame_count} frames of others came before the word"
    );
}

/// Control items and frames of one task arrive in the order in which they were sent.
#[tokio::test(flavor = "multi_thread")]
async fn control_items_and_frames_keep_their_order() {
    const ROUND_COUNT: u64 = 300;
    let (mut daemon1, mut daemon2) = connected_pair("fences", Duration::from_secs(10)).await;
    let dst = Tid::for_task(host(2), 1).expect("a task");
    for seq in 0..ROUND_COUNT {
        // Large frames need a long time on the wire, control items a short time.
        daemon1.net.send_data(
            daemon2.own_host,
            DataMsg::Frame(link_frame(1, 1, 2 * seq, 50_000)),
        );
        daemon1.net.send_data(
            daemon2.own_host,
            DataMsg::RouteDrained {
                dst,
                epoch: Epoch(seq),
            },
        );
        daemon1.net.send_data(
            daemon2.own_host,
            DataMsg::Frame(link_frame(1, 1, 2 * seq + 1, 8)),
        );
    }
    for seq in 0..ROUND_COUNT {
        assert_eq!(wait_for_frame(&mut daemon2).await.1, 2 * seq);
        match timeout(STEP_TIMEOUT, daemon2.wait_for_input()).await {
            Ok(DaemonInput::Data(DataMsg::RouteDrained { epoch, .. })) => {
                assert_eq!(epoch, Epoch(seq))
            }
            unexpected_input => panic!("instead of the word {seq}: {unexpected_input:?}"),
        }
        assert_eq!(wait_for_frame(&mut daemon2).await.1, 2 * seq + 1);
    }
}

/// No frame is lost if there are more pairs than pair streams and if tasks exit.
#[tokio::test(flavor = "multi_thread")]
async fn more_pairs_than_streams_lose_nothing() {
    const PAIR_COUNT: u32 = LANES_MAX as u32 + 90;
    const FRAMES_PER_PAIR: u64 = 6;
    let (mut daemon1, mut daemon2) = connected_pair("many", Duration::from_secs(10)).await;
    // There are two generations of tasks. The tasks of both generations exit.
    for generation in 0..2 {
        let first_pair = generation * PAIR_COUNT + 1;
        for seq in 0..FRAMES_PER_PAIR {
            for pair in first_pair..first_pair + PAIR_COUNT {
                daemon1.net.send_data(
                    daemon2.own_host,
                    DataMsg::Frame(link_frame(pair, pair, seq, 500)),
                );
            }
        }
        for pair in first_pair..first_pair + PAIR_COUNT {
            let dst = Tid::for_task(host(1), pair).expect("a task");
            daemon1.net.send_data(
                daemon2.own_host,
                DataMsg::TaskEnded {
                    tid: dst,
                    watermarks: Vec::new(),
                    past: Default::default(),
                },
            );
        }
    }
    let mut frame_counts = HashMap::new();
    for _ in 0..2 * PAIR_COUNT as u64 * (FRAMES_PER_PAIR + 1) {
        match timeout(STEP_TIMEOUT, daemon2.wait_for_input()).await {
            Ok(DaemonInput::Data(DataMsg::Frame(body))) => {
                let frame = LinkFrame::decode(body).expect("a link frame");
                let frame_count: &mut u64 = frame_counts.entry(frame.src).or_default();
                assert_eq!(frame.seq, *frame_count, "{}", frame.src);
                *frame_count += 1;
            }
            Ok(DaemonInput::Data(DataMsg::TaskEnded { tid: dst, .. })) => {
                assert_eq!(
                    frame_counts.get(&dst),
                    Some(&FRAMES_PER_PAIR),
                    "{dst} ended"
                )
            }
            unexpected_input => panic!("after {} tasks: {unexpected_input:?}", frame_counts.len()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn control_message_waits_for_session() {
    let authority = Authority::new("pvm").expect("a key");
    let lease = Duration::from_secs(10);
    let mut daemon1 = Daemon::start("wait", 1, &authority.issue(host(1)).expect("a key"), lease);
    let mut daemon2 = Daemon::start("wait", 2, &authority.issue(host(2)).expect("a key"), lease);
    daemon1
        .net
        .send_control(daemon2.own_host, &commit_message(7));
    // Only the host with the lower index knows the address of the host with the higher index.
    daemon1
        .net
        .keep_connected(daemon2.own_host, vec![daemon2.address()]);
    tokio::join!(
        daemon1.wait_for_session(host(2)),
        daemon2.wait_for_session(host(1))
    );
    assert!(
        matches!(timeout(STEP_TIMEOUT, daemon2.wait_for_input()).await, Ok(DaemonInput::Control(m)) if m == commit_message(7))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_certificate_fails_handshake() {
    let (authority, foreign_authority) = (
        Authority::new("pvm").expect("a key"),
        Authority::new("pvm").expect("a key"),
    );
    let lease = Duration::from_secs(10);
    let mut daemon1 = Daemon::start(
        "foreign",
        1,
        &authority.issue(host(1)).expect("a key"),
        lease,
    );
    let mut foreign_daemon = Daemon::start(
        "foreign",
        2,
        &foreign_authority.issue(host(2)).expect("a key"),
        lease,
    );
    foreign_daemon
        .net
        .keep_connected(daemon1.own_host, vec![daemon1.address()]);
    let is_refusal = |input: &DaemonInput| matches!(input, DaemonInput::Event(Event::UnauthenticatedPeer { text }) if text.starts_with("refused a connection from"));
    let input = timeout(STEP_TIMEOUT, daemon1.wait_for_input())
        .await
        .expect("in time");
    assert!(is_refusal(&input), "{input:?}");
    let silence_duration = Duration::from_millis(200);
    while let Ok(input) = timeout(silence_duration, daemon1.wait_for_input()).await {
        assert!(is_refusal(&input), "{input:?}");
    }
    assert!(
        timeout(silence_duration, foreign_daemon.wait_for_input())
            .await
            .is_err()
    );
    foreign_daemon.net.expel_host(daemon1.own_host);
    // The refused connection does not affect a third daemon.
    let mut daemon3 = Daemon::start(
        "foreign",
        3,
        &authority.issue(host(3)).expect("a key"),
        lease,
    );
    daemon3
        .net
        .keep_connected(daemon1.own_host, vec![daemon1.address()]);
    tokio::join!(
        daemon1.wait_for_session(host(3)),
        daemon3.wait_for_session(host(1))
    );
}

/// Verifier of a client that accepts every server certificate.
#[derive(Debug)]
struct AcceptAnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// A client that accepts every server certificate is refused if it has a foreign certificate or no
/// certificate.
#[tokio::test(flavor = "multi_thread")]
async fn client_without_valid_certificate_is_refused() {
    let (authority, foreign_authority) = (
        Authority::new("pvm").expect("a key"),
        Authority::new("pvm").expect("a key"),
    );
    let mut daemon1 = Daemon::start(
        "careless",
        1,
        &authority.issue(host(1)).expect("a key"),
        Duration::from_secs(10),
    );
    for client_credentials in [Some(foreign_authority.issue(host(2)).expect("a key")), None] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAnyServer(provider)));
        let mut tls = match &client_credentials {
            Some(credentials) => tls
                .with_client_auth_cert(
                    vec![CertificateDer::from(credentials.certificate.clone())],
                    PrivatePkcs8KeyDer::from(credentials.key.clone()).into(),
                )
                .expect("a certificate"),
            None => tls.with_no_client_auth(),
        };
        tls.alpn_protocols = vec![super::pki::ALPN.to_vec()];
        let client =
            quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("TLS 1.3")));
        let endpoint =
            quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let handshake = endpoint
            .connect_with(client, daemon1.address(), "h1.vpvmv.sempa")
            .expect("an address");
        let close_reason = async {
            match handshake.await {
                Ok(connection) => connection.closed().await,
                Err(why) => why,
            }
        };
        let close_reason = timeout(STEP_TIMEOUT, close_reason).await.expect("in time");
        assert!(
            matches!(close_reason, quinn::ConnectionError::ConnectionClosed(_)),
            "{close_reason:?}"
        );
        match timeout(STEP_TIMEOUT, daemon1.wait_for_input())
            .await
            .expect("in time")
        {
            DaemonInput::Event(Event::UnauthenticatedPeer { text }) => {
                assert!(
                    text.contains("no certificate of this virtual machine"),
                    "{text}"
                );
            }
            seen => panic!("{seen:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_host_is_lost_after_lease() {
    let lease = Duration::from_millis(1000);
    let (mut daemon1, mut daemon2) = connected_pair("lease", lease).await;
    let input_during_lease = timeout(lease * 2, daemon1.wait_for_input()).await;
    assert!(
        input_during_lease.is_err(),
        "keep-alives hold an idle session: {input_during_lease:?}"
    );
    let Daemon { net, .. } = &mut daemon2;
    net.cut_network();
    match timeout(STEP_TIMEOUT, daemon1.wait_for_input())
        .await
        .expect("in time")
    {
        DaemonInput::SessionChange(SessionChange::Lost(lost_host, why)) => {
            assert!(
                lost_host == host(2) && why.contains("it sent nothing"),
                "{why}"
            )
        }
        unexpected_input => panic!("{unexpected_input:?}"),
    }
    daemon1.net.expel_host(host(2));
}
