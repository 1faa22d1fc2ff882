//! Tests with the networks of two or three daemons on loopback: how sessions are established, and
//! how they transfer data.

use super::bulk_fallback::BulkFallbacks;
use super::images::ImageTransfers;
use super::input::{INPUT_QUEUE_MAX, Input};
use super::net::{Net, SessionChange, bind_udp};
use super::pki::{Authority, HostCredentials};
use super::session::{StreamPurpose, open_bidirectional};
use super::session_input::{BulkContent, NetInput};
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
use sempa_proto::{Epoch, HostId, MigrationId, Tid};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Time limit of each step; far more than needed, because machines may be loaded.
const DEADLINE: Duration = Duration::from_secs(30);

struct Daemon {
    net: Net,
    images: ImageTransfers,
    fallbacks: BulkFallbacks,
    inputs: mpsc::Receiver<Input>,
    own_host: HostId,
    dir: PathBuf,
    /// The session that delivered data last.
    last_session: (HostId, u64),
}

fn host(index: u16) -> HostId {
    HostId::new(index).expect("an index")
}

fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("pvmd-net-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("a scratch directory");
    dir
}

impl Daemon {
    fn start(test: &str, own_host: u16, identity: &HostCredentials, lease: Duration) -> Daemon {
        let dir = scratch(&format!("{test}-{own_host}"));
        let tmp = dir.to_string_lossy().into_owned();
        let place = RuntimePaths::from_env(0, |name| (name == "PVM_TMP").then(|| tmp.clone()))
            .expect("a good name");
        std::fs::create_dir_all(place.dir()).expect("writable");
        let (sender, inputs) = mpsc::channel(INPUT_QUEUE_MAX);
        let socket = bind_udp(0).expect("a port");
        let net = Net::start(
            socket,
            identity,
            ("pvm", host(own_host)),
            lease,
            sender.clone(),
        )
        .expect("TLS");
        let fallbacks = BulkFallbacks::new();
        Daemon {
            net,
            images: ImageTransfers::new(place, sender, Arc::default(), fallbacks.clone()),
            fallbacks,
            inputs,
            own_host: host(own_host),
            dir,
            last_session: (host(own_host), 0),
        }
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.net.port().expect("bound")))
    }

    /// Returns the next input or session change that a daemon's loop would handle.
    async fn next(&mut self) -> DaemonInput {
        loop {
            let (host, number) = self.last_session;
            if let Some(carried) = self.net.next_data(host, number) {
                return DaemonInput::Data(carried);
            }
            let input = self
                .inputs
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
                    number,
                    item: parcel,
                }) => {
                    self.net.accept_data(host, number, parcel);
                    self.last_session = (host, number);
                }
                Input::Net(NetInput::Images(announced)) => {
                    self.images.on_announcement(announced);
                }
                Input::Net(NetInput::FallbackStream {
                    host,
                    migration,
                    what,
                    streams,
                }) => {
                    self.fallbacks.on_stream(host, migration, what, streams);
                }
                Input::Net(input) => {
                    if let Some(news) = self.net.handle_input(input).pop() {
                        return DaemonInput::SessionChange(news);
                    }
                }
                Input::TaskConnected(_) => unreachable!("nobody listens for tasks here"),
            }
        }
    }

    /// Waits for a session; refused connections are ignored.
    async fn await_session(&mut self, other: HostId) {
        loop {
            match timeout(DEADLINE, self.next()).await {
                Ok(DaemonInput::SessionChange(SessionChange::Connected(host))) if host == other => {
                    return;
                }
                Ok(DaemonInput::Event(Event::Unauthenticated { .. })) => {}
                seen => panic!(
                    "{} waited for a session with {other}, saw {seen:?}",
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
async fn connected_pair(test: &str, lease: Duration) -> (Daemon, Daemon) {
    let authority = Authority::new("pvm").expect("a key");
    let mut one = Daemon::start(test, 1, &authority.issue(host(1)).expect("a key"), lease);
    let mut two = Daemon::start(test, 2, &authority.issue(host(2)).expect("a key"), lease);
    one.net.connect(two.own_host, vec![two.address()]);
    two.net.connect(one.own_host, vec![one.address()]);
    tokio::join!(one.await_session(host(2)), two.await_session(host(1)));
    (one, two)
}

fn commit_message(epoch: u64) -> HostMsg {
    HostMsg::TableCommitted {
        epoch: Epoch(epoch),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_queued_before_session_all_arrive() {
    let authority = Authority::new("pvm").expect("a key");
    let mut one = Daemon::start(
        "early",
        1,
        &authority.issue(host(1)).expect("a key"),
        Duration::from_secs(10),
    );
    let mut two = Daemon::start(
        "early",
        2,
        &authority.issue(host(2)).expect("a key"),
        Duration::from_secs(10),
    );
    // More than the windows of many links.
    let (frame, count) = (Bytes::from(vec![7; 64 << 10]), 1600);
    for _ in 0..count {
        one.net.send_data(host(2), DataMsg::Frame(frame.clone()));
    }
    one.net.connect(two.own_host, vec![two.address()]);
    two.net.connect(one.own_host, vec![one.address()]);
    tokio::join!(one.await_session(host(2)), two.await_session(host(1)));
    for n in 0..count {
        match timeout(DEADLINE, two.next()).await {
            Ok(DaemonInput::Data(DataMsg::Frame(came))) if came == frame => {}
            seen => panic!("after {n} of {count} frames came {seen:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mutual_connect_yields_one_ordered_session() {
    let (mut one, mut two) = connected_pair("talk", Duration::from_secs(10)).await;
    for n in 0..2000 {
        one.net.send_control(two.own_host, &commit_message(n));
        two.net.send_data(
            one.own_host,
            DataMsg::Frame(Bytes::from(vec![n as u8; 5000])),
        );
    }
    for n in 0..2000 {
        match timeout(DEADLINE, two.next()).await.expect("in time") {
            DaemonInput::Control(message) => assert_eq!(message, commit_message(n)),
            seen => panic!("{seen:?}"),
        }
        match timeout(DEADLINE, one.next()).await.expect("in time") {
            DaemonInput::Data(DataMsg::Frame(body)) => assert_eq!(body, vec![n as u8; 5000]),
            seen => panic!("{seen:?}"),
        }
    }
}

/// Builds a frame from a task of host 1 to a task of host 2.
fn frame(src: u32, dst: u32, seq: u64, bytes: usize) -> Bytes {
    let (src, dst) = (
        Tid::task(host(1), src).expect("a task"),
        Tid::task(host(2), dst).expect("a task"),
    );
    let kind = LinkKind::Data { last: true };
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

/// Returns the ends and the sequence number of the next link frame.
async fn next_frame(daemon: &mut Daemon) -> ((Tid, Tid), u64) {
    match timeout(DEADLINE, daemon.next()).await {
        Ok(DaemonInput::Data(DataMsg::Frame(body))) => {
            let frame = LinkFrame::decode(body).expect("a link frame");
            ((frame.src, frame.dst), frame.seq)
        }
        seen => panic!("instead of a link frame: {seen:?}"),
    }
}

// On one thread, as in the daemon: everything is queued before the first frame leaves.
#[tokio::test]
async fn busy_pair_does_not_delay_another_pair() {
    const BEFORE: u64 = 20;
    // Far more than can be in flight.
    const MUCH: u64 = 2000;
    let (mut one, mut two) = connected_pair("lanes", Duration::from_secs(10)).await;
    for seq in 0..BEFORE {
        one.net
            .send_data(two.own_host, DataMsg::Frame(frame(1, 1, seq, 100)));
        one.net
            .send_data(two.own_host, DataMsg::Frame(frame(2, 2, seq, 100)));
    }
    for _ in 0..2 * BEFORE {
        next_frame(&mut two).await;
    }
    for seq in 0..MUCH {
        one.net
            .send_data(two.own_host, DataMsg::Frame(frame(1, 1, seq, 60 << 10)));
    }
    one.net
        .send_data(two.own_host, DataMsg::Frame(frame(2, 2, BEFORE, 8)));
    let (mut behind, mut much) = (0, 0);
    while much < MUCH {
        let (ends, seq) = next_frame(&mut two).await;
        if seq == BEFORE && ends.0 == Tid::task(host(1), 2).expect("a task") {
            behind = MUCH - much;
        } else {
            assert_eq!(seq, much, "a frame of one pair has overtaken another one");
            much += 1;
        }
    }
    assert!(
        behind > 0,
        "the one frame came behind all {MUCH} that another pair had said before"
    );
}

// On one thread, as in the daemon: everything is queued before the first frame leaves.
/// A small frame of one pair does not wait for the backlog of a hundred streaming pairs.
#[tokio::test]
async fn frame_overtakes_backlog_of_hundred_pairs() {
    const BEFORE: u64 = 10;
    const STREAMING: u32 = 100;
    // In total far more than can be in flight.
    const MUCH: u64 = 16;
    let (mut one, mut two) = connected_pair("hundred", Duration::from_secs(10)).await;
    let last = STREAMING + 1;
    for seq in 0..BEFORE {
        (1..=last).for_each(|pair| {
            one.net
                .send_data(two.own_host, DataMsg::Frame(frame(pair, pair, seq, 8)))
        });
    }
    for _ in 0..BEFORE * u64::from(last) {
        next_frame(&mut two).await;
    }
    for seq in BEFORE..BEFORE + MUCH {
        (1..last).for_each(|pair| {
            one.net.send_data(
                two.own_host,
                DataMsg::Frame(frame(pair, pair, seq, 60 << 10)),
            )
        });
    }
    let begun = Instant::now();
    one.net
        .send_data(two.own_host, DataMsg::Frame(frame(last, last, BEFORE, 8)));
    let (src, all) = (
        Tid::task(host(1), last).expect("a task"),
        MUCH * u64::from(STREAMING),
    );
    let mut before = 0;
    while next_frame(&mut two).await.0.0 != src {
        before += 1;
    }
    println!(
        "{before} of {all} frames came before the word, which took {} ms",
        begun.elapsed().as_millis()
    );
    assert!(
        before < all / 2,
        "{before} of {all} frames of others came before the word"
    );
}

/// Control items and frames of one task arrive in the order in which they were sent.
#[tokio::test(flavor = "multi_thread")]
async fn control_items_and_frames_keep_their_order() {
    const ROUNDS: u64 = 300;
    let (mut one, mut two) = connected_pair("fences", Duration::from_secs(10)).await;
    let dst = Tid::task(host(2), 1).expect("a task");
    for seq in 0..ROUNDS {
        // Large frames take long in transit; control items are small.
        one.net
            .send_data(two.own_host, DataMsg::Frame(frame(1, 1, 2 * seq, 50_000)));
        one.net.send_data(
            two.own_host,
            DataMsg::RouteDrained {
                dst,
                epoch: Epoch(seq),
            },
        );
        one.net
            .send_data(two.own_host, DataMsg::Frame(frame(1, 1, 2 * seq + 1, 8)));
    }
    for seq in 0..ROUNDS {
        assert_eq!(next_frame(&mut two).await.1, 2 * seq);
        match timeout(DEADLINE, two.next()).await {
            Ok(DaemonInput::Data(DataMsg::RouteDrained { epoch, .. })) => {
                assert_eq!(epoch, Epoch(seq))
            }
            seen => panic!("instead of the word {seq}: {seen:?}"),
        }
        assert_eq!(next_frame(&mut two).await.1, 2 * seq + 1);
    }
}

/// More pairs than pair streams, and the exits of their tasks, lose no frame.
#[tokio::test(flavor = "multi_thread")]
async fn more_pairs_than_streams_lose_nothing() {
    const PAIRS: u32 = LANES_MAX as u32 + 90;
    const EACH: u64 = 6;
    let (mut one, mut two) = connected_pair("many", Duration::from_secs(10)).await;
    // Two generations of tasks, both of which exit.
    for generation in 0..2 {
        let first = generation * PAIRS + 1;
        for seq in 0..EACH {
            for pair in first..first + PAIRS {
                one.net
                    .send_data(two.own_host, DataMsg::Frame(frame(pair, pair, seq, 500)));
            }
        }
        for pair in first..first + PAIRS {
            let dst = Tid::task(host(1), pair).expect("a task");
            one.net.send_data(
                two.own_host,
                DataMsg::Ended {
                    tid: dst,
                    watermarks: Vec::new(),
                },
            );
        }
    }
    let mut seen = HashMap::new();
    for _ in 0..2 * PAIRS as u64 * (EACH + 1) {
        match timeout(DEADLINE, two.next()).await {
            Ok(DaemonInput::Data(DataMsg::Frame(body))) => {
                let frame = LinkFrame::decode(body).expect("a link frame");
                let count: &mut u64 = seen.entry(frame.src).or_default();
                assert_eq!(frame.seq, *count, "{}", frame.src);
                *count += 1;
            }
            Ok(DaemonInput::Data(DataMsg::Ended { tid: dst, .. })) => {
                assert_eq!(seen.get(&dst), Some(&EACH), "{dst} ended")
            }
            other => panic!("after {} tasks: {other:?}", seen.len()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn control_message_waits_for_session() {
    let authority = Authority::new("pvm").expect("a key");
    let lease = Duration::from_secs(10);
    let mut one = Daemon::start("wait", 1, &authority.issue(host(1)).expect("a key"), lease);
    let mut two = Daemon::start("wait", 2, &authority.issue(host(2)).expect("a key"), lease);
    one.net.send_control(two.own_host, &commit_message(7));
    // Only the host with the lower index has an address of the other.
    one.net.connect(two.own_host, vec![two.address()]);
    tokio::join!(one.await_session(host(2)), two.await_session(host(1)));
    assert!(
        matches!(timeout(DEADLINE, two.next()).await, Ok(DaemonInput::Control(m)) if m == commit_message(7))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_certificate_fails_handshake() {
    let (ours, theirs) = (
        Authority::new("pvm").expect("a key"),
        Authority::new("pvm").expect("a key"),
    );
    let lease = Duration::from_secs(10);
    let mut one = Daemon::start("foreign", 1, &ours.issue(host(1)).expect("a key"), lease);
    let mut stranger = Daemon::start("foreign", 2, &theirs.issue(host(2)).expect("a key"), lease);
    stranger.net.connect(one.own_host, vec![one.address()]);
    let is_refusal = |seen: &DaemonInput| matches!(seen, DaemonInput::Event(Event::Unauthenticated { text }) if text.starts_with("refused a connection from"));
    let seen = timeout(DEADLINE, one.next()).await.expect("in time");
    assert!(is_refusal(&seen), "{seen:?}");
    let quiet = Duration::from_millis(200);
    while let Ok(seen) = timeout(quiet, one.next()).await {
        assert!(is_refusal(&seen), "{seen:?}");
    }
    assert!(timeout(quiet, stranger.next()).await.is_err());
    stranger.net.expel(one.own_host);
    // The refused connection does not affect others.
    let mut three = Daemon::start("foreign", 3, &ours.issue(host(3)).expect("a key"), lease);
    three.net.connect(one.own_host, vec![one.address()]);
    tokio::join!(one.await_session(host(3)), three.await_session(host(1)));
}

/// A client that accepts every server certificate.
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

/// A client that accepts every server is refused if it has a foreign certificate or none.
#[tokio::test(flavor = "multi_thread")]
async fn client_without_valid_certificate_is_refused() {
    let (ours, theirs) = (
        Authority::new("pvm").expect("a key"),
        Authority::new("pvm").expect("a key"),
    );
    let mut one = Daemon::start(
        "careless",
        1,
        &ours.issue(host(1)).expect("a key"),
        Duration::from_secs(10),
    );
    for identity in [Some(theirs.issue(host(2)).expect("a key")), None] {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AcceptAnyServer(provider)));
        let mut tls = match &identity {
            Some(own) => tls
                .with_client_auth_cert(
                    vec![CertificateDer::from(own.certificate.clone())],
                    PrivatePkcs8KeyDer::from(own.key.clone()).into(),
                )
                .expect("a certificate"),
            None => tls.with_no_client_auth(),
        };
        tls.alpn_protocols = vec![super::pki::ALPN.to_vec()];
        let client =
            quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("TLS 1.3")));
        let endpoint =
            quinn::Endpoint::client(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let connecting = endpoint
            .connect_with(client, one.address(), "h1.vpvmv.sempa")
            .expect("an address");
        let ended = async {
            match connecting.await {
                Ok(connection) => connection.closed().await,
                Err(why) => why,
            }
        };
        let ended = timeout(DEADLINE, ended).await.expect("in time");
        assert!(
            matches!(ended, quinn::ConnectionError::ConnectionClosed(_)),
            "{ended:?}"
        );
        match timeout(DEADLINE, one.next()).await.expect("in time") {
            DaemonInput::Event(Event::Unauthenticated { text }) => {
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
    let (mut one, mut two) = connected_pair("lease", lease).await;
    let quiet = timeout(lease * 2, one.next()).await;
    assert!(
        quiet.is_err(),
        "keep-alives hold an idle session: {quiet:?}"
    );
    let Daemon { net, .. } = &mut two;
    net.cut_network();
    match timeout(DEADLINE, one.next()).await.expect("in time") {
        DaemonInput::SessionChange(SessionChange::Lost(lost, why)) => {
            assert!(lost == host(2) && why.contains("it sent nothing"), "{why}")
        }
        seen => panic!("{seen:?}"),
    }
    one.net.expel(host(2));
}

/// Sends images and checks that the second daemon refuses them, and that only the first daemon
/// reports the refusal.
async fn assert_refused(one: &mut Daemon, two: &mut Daemon, migration: MigrationId) {
    one.images.send(migration, host(2), &mut one.net);
    let refused = tokio::select! {
        seen = one.next() => seen,
        seen = two.next() => panic!("the target told of it: {seen:?}"),
    };
    assert!(
        matches!(
            &refused,
            DaemonInput::Event(Event::ImagesSent { result: Err(_), .. })
        ),
        "{refused:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn images_arrive_only_where_expected() {
    let (mut one, mut two) = connected_pair("images", Duration::from_secs(10)).await;
    let migration = MigrationId(5);
    let from = one.images_dir(migration);
    std::fs::create_dir(&from).expect("writable");
    let content: Vec<u8> = (0..40_000_000u32).map(|i| (i >> 7) as u8).collect();
    std::fs::write(from.join("pages-1.img"), &content).expect("writable");
    std::fs::write(from.join("core-1.img"), b"core").expect("writable");

    // No images are expected yet.
    assert_refused(&mut one, &mut two, migration).await;

    // Images are expected from another host, and stay expected.
    two.images.expect(migration, host(3));
    assert_refused(&mut one, &mut two, migration).await;
    assert!(two.images.expects(migration, host(3)));

    two.images.expect(migration, host(1));
    let begin = std::time::Instant::now();
    let Daemon { images, net, .. } = &mut one;
    images.send(migration, host(2), net);
    let (sent, received) =
        tokio::join!(timeout(DEADLINE, one.next()), timeout(DEADLINE, two.next()));
    let rate = content.len() as f64 / begin.elapsed().as_secs_f64() / 1e6;
    println!("{rate:.0} MB/s");
    let bytes = content.len() as u64 + 4;
    assert!(
        matches!(&sent, Ok(DaemonInput::Event(Event::ImagesSent { result: Ok(n), .. })) if *n == bytes),
        "{sent:?}"
    );
    assert!(
        matches!(&received, Ok(DaemonInput::Event(Event::ImagesReceived { result: Ok(n), .. })) if *n == bytes),
        "{received:?}"
    );
    assert_eq!(
        std::fs::read(two.images_dir(migration).join("pages-1.img")).expect("there"),
        content
    );

    two.images.drop_images(migration);
    two.await_images_removed(migration).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_use_session_stream_if_tcp_is_blocked() {
    let (mut one, mut two) = connected_pair("detour", Duration::from_secs(10)).await;
    two.fallbacks.mark_tcp_blocked(host(1));
    let content: Vec<u8> = (0..20_000_000u32).map(|i| (i >> 7) as u8).collect();
    for number in 0..3 {
        let migration = MigrationId(50 + number);
        let from = one.images_dir(migration);
        std::fs::create_dir(&from).expect("writable");
        std::fs::write(from.join("pages-1.img"), &content).expect("writable");
        two.images.expect(migration, host(1));
        let Daemon { images, net, .. } = &mut one;
        images.send(migration, host(2), net);
        // Each daemon must read its inputs for the other to make progress.
        let (mut sent, mut received) = (None, None);
        while sent.is_none() || received.is_none() {
            tokio::select! {
                seen = timeout(DEADLINE, one.next()), if sent.is_none() => sent = Some(seen.expect("in time")),
                seen = timeout(DEADLINE, two.next()), if received.is_none() => received = Some(seen.expect("in time")),
            }
        }
        let bytes = content.len() as u64;
        assert!(
            matches!(&sent, Some(DaemonInput::Event(Event::ImagesSent { result: Ok(n), .. })) if *n == bytes),
            "{sent:?}"
        );
        assert!(
            matches!(&received, Some(DaemonInput::Event(Event::ImagesReceived { result: Ok(n), .. })) if *n == bytes),
            "{received:?}"
        );
        assert_eq!(
            std::fs::read(two.images_dir(migration).join("pages-1.img")).expect("there"),
            content
        );
        two.images.drop_images(migration);
        one.images.drop_images(migration);
        two.await_images_removed(migration).await;
    }
}

/// A session stream for an unexpected transfer is refused, and the session continues.
#[tokio::test(flavor = "multi_thread")]
async fn unexpected_bulk_stream_is_refused() {
    let (mut one, mut two) = connected_pair("uninvited", Duration::from_secs(10)).await;
    let (pair, session) = two
        .net
        .await_session(host(1))
        .session()
        .await
        .expect("it stands");
    for what in [BulkContent::Images, BulkContent::Memory] {
        let purpose = StreamPurpose::BulkFallback(MigrationId(70), what);
        let (_out, mut back) = open_bidirectional(&pair, &session, purpose)
            .await
            .expect("a stream");
        let mut said = [0; 1];
        tokio::select! {
            read = timeout(DEADLINE, back.read_exact(&mut said)) => assert!(matches!(read, Ok(Err(_))), "{read:?}"),
            seen = one.next() => panic!("nobody has to know: {seen:?}"),
        }
    }
    two.net.send_control(one.own_host, &commit_message(3));
    assert!(
        matches!(timeout(DEADLINE, one.next()).await, Ok(DaemonInput::Control(m)) if m == commit_message(3))
    );
}

/// Images wait for a session that is being established; for an unknown host they fail at once.
#[tokio::test(flavor = "multi_thread")]
async fn images_wait_for_pending_session() {
    let authority = Authority::new("pvm").expect("a key");
    let mut one = Daemon::start(
        "soon",
        1,
        &authority.issue(host(1)).expect("a key"),
        Duration::from_secs(10),
    );
    let mut two = Daemon::start(
        "soon",
        2,
        &authority.issue(host(2)).expect("a key"),
        Duration::from_secs(10),
    );
    let migration = MigrationId(6);
    let from = one.images_dir(migration);
    std::fs::create_dir(&from).expect("writable");
    std::fs::write(from.join("core-1.img"), b"core").expect("writable");
    let Daemon { images, net, .. } = &mut one;
    images.send(migration, host(2), net);
    let refused = timeout(DEADLINE, one.next()).await.expect("in time");
    assert!(
        matches!(
            &refused,
            DaemonInput::Event(Event::ImagesSent { result: Err(_), .. })
        ),
        "{refused:?}"
    );

    two.images.expect(migration, host(1));
    let address = two.address();
    let Daemon { images, net, .. } = &mut one;
    net.connect(host(2), vec![address]);
    images.send(migration, host(2), net);
    two.net.connect(one.own_host, vec![one.address()]);
    tokio::join!(one.await_session(host(2)), two.await_session(host(1)));
    let (sent, received) =
        tokio::join!(timeout(DEADLINE, one.next()), timeout(DEADLINE, two.next()));
    assert!(
        matches!(
            &sent,
            Ok(DaemonInput::Event(Event::ImagesSent { result: Ok(4), .. }))
        ),
        "{sent:?}"
    );
    assert!(
        matches!(
            &received,
            Ok(DaemonInput::Event(Event::ImagesReceived {
                result: Ok(4),
                ..
            }))
        ),
        "{received:?}"
    );
}

/// Images that the target drops on arrival are reported as sent at the source.
#[tokio::test(flavor = "multi_thread")]
async fn images_dropped_on_arrival_count_as_sent() {
    let (mut one, mut two) = connected_pair("at-once", Duration::from_secs(10)).await;
    for number in 0..100 {
        let migration = MigrationId(100 + number);
        let from = one.images_dir(migration);
        std::fs::create_dir(&from).expect("writable");
        std::fs::write(from.join("core-1.img"), b"core").expect("writable");
        two.images.expect(migration, host(1));
        let Daemon { images, net, .. } = &mut one;
        images.send(migration, host(2), net);
        let received = timeout(DEADLINE, two.next()).await.expect("in time");
        assert!(
            matches!(
                &received,
                DaemonInput::Event(Event::ImagesReceived { result: Ok(4), .. })
            ),
            "{received:?}"
        );
        two.images.drop_images(migration);
        let sent = timeout(DEADLINE, one.next()).await.expect("in time");
        assert!(
            matches!(
                &sent,
                DaemonInput::Event(Event::ImagesSent { result: Ok(4), .. })
            ),
            "{number}: {sent:?}"
        );
        one.images.drop_images(migration);
    }
}

/// Images are sent while they are being written, and either end may abort the transfer.
#[tokio::test(flavor = "multi_thread")]
async fn growing_images_are_sent_and_either_end_may_abort() {
    for target_gives_up in [true, false] {
        let (mut one, mut two) = connected_pair("ahead", Duration::from_secs(10)).await;
        let migration = MigrationId(5);
        let from = one.images_dir(migration);
        std::fs::create_dir(&from).expect("writable");
        std::fs::write(from.join("pages-1.img"), vec![9; 1 << 20]).expect("writable");
        two.images.expect(migration, host(1));
        let Daemon { images, net, .. } = &mut one;
        images.start_streaming(migration, host(2), net);
        let there = two.images_dir(migration).join("pages-1.img");
        let arrives = async {
            while std::fs::metadata(&there).map_or(0, |meta| meta.len()) < 1 << 20 {
                // The daemon must read its inputs to make progress.
                let _ = timeout(Duration::from_millis(10), two.next()).await;
            }
        };
        timeout(DEADLINE, arrives)
            .await
            .expect("what is there is sent");
        let (gives_up, other) = if target_gives_up {
            (&mut two, &mut one)
        } else {
            (&mut one, &mut two)
        };
        gives_up.images.drop_images(migration);
        gives_up.await_images_removed(migration).await;
        let told = timeout(DEADLINE, other.next()).await;
        let failed = matches!(
            &told,
            Ok(DaemonInput::Event(
                Event::ImagesSent { result: Err(_), .. }
                    | Event::ImagesReceived { result: Err(_), .. }
            ))
        );
        assert!(failed, "{told:?}");
        other.images.drop_images(migration);
        other.await_images_removed(migration).await;
    }
}

impl Daemon {
    /// Waits until the images are removed, which happens when no work on them is left.
    async fn await_images_removed(&self, migration: MigrationId) {
        let gone = async {
            while self.images_dir(migration).exists() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(DEADLINE, gone)
            .await
            .expect("the images are removed");
    }

    fn images_dir(&self, migration: MigrationId) -> PathBuf {
        self.dir
            .join("sempa-0/pvm")
            .join(format!("images-{}", migration.0))
    }
}
