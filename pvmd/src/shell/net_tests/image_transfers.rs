//! Tests of the transfer of images and of bulk streams between daemons.

use super::{Daemon, DaemonInput, STEP_TIMEOUT, commit_message, connected_pair, host};
use crate::shell::pki::Authority;
use crate::shell::session::{StreamPurpose, open_bidirectional};
use crate::shell::session_input::BulkContent;
use pvmd_machine::Event;
use sempa_proto::MigrationId;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Sends images from `source` to `target`. Checks that `target` refuses the images and that only
/// `source` reports the refusal.
async fn assert_images_refused(source: &mut Daemon, target: &mut Daemon, migration: MigrationId) {
    source
        .images
        .send_images(migration, host(2), &mut source.net);
    let refusal = tokio::select! {
        input = source.wait_for_input() => input,
        input = target.wait_for_input() => panic!("the target told of it: {input:?}"),
    };
    assert!(
        matches!(
            &refusal,
            DaemonInput::Event(Event::ImagesSent { result: Err(_), .. })
        ),
        "{refusal:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn images_arrive_only_where_expected() {
    let (mut source, mut target) = connected_pair("images", Duration::from_secs(10)).await;
    let migration = MigrationId(5);
    let source_dir = source.images_dir(migration);
    std::fs::create_dir(&source_dir).expect("writable");
    let content: Vec<u8> = (0..40_000_000u32).map(|i| (i >> 7) as u8).collect();
    std::fs::write(source_dir.join("pages-1.img"), &content).expect("writable");
    std::fs::write(source_dir.join("core-1.img"), b"core").expect("writable");

    // No images are expected yet.
    assert_images_refused(&mut source, &mut target, migration).await;

    // Images are expected from another host. The refused images do not end this expectation.
    target.images.expect_images(migration, host(3));
    assert_images_refused(&mut source, &mut target, migration).await;
    assert!(target.images.is_expected(migration, host(3)));

    target.images.expect_images(migration, host(1));
    let started_at = Instant::now();
    let Daemon { images, net, .. } = &mut source;
    images.send_images(migration, host(2), net);
    let (source_input, target_input) = tokio::join!(
        timeout(STEP_TIMEOUT, source.wait_for_input()),
        timeout(STEP_TIMEOUT, target.wait_for_input())
    );
    let rate_mb_per_s = content.len() as f64 / started_at.elapsed().as_secs_f64() / 1e6;
    println!("{rate_mb_per_s:.0} MB/s");
    let bytes = content.len() as u64 + 4;
    assert!(
        matches!(&source_input, Ok(DaemonInput::Event(Event::ImagesSent { result: Ok(n), .. })) if *n == bytes),
        "{source_input:?}"
    );
    assert!(
        matches!(&target_input, Ok(DaemonInput::Event(Event::ImagesReceived { result: Ok(n), .. })) if *n == bytes),
        "{target_input:?}"
    );
    assert_eq!(
        std::fs::read(target.images_dir(migration).join("pages-1.img")).expect("there"),
        content
    );

    target.images.drop_images(migration);
    target.wait_until_images_removed(migration).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn images_use_session_stream_if_tcp_is_blocked() {
    let (mut source, mut target) = connected_pair("detour", Duration::from_secs(10)).await;
    target.fallbacks.mark_tcp_blocked(host(1));
    let content: Vec<u8> = (0..20_000_000u32).map(|i| (i >> 7) as u8).collect();
    for number in 0..3 {
        let migration = MigrationId(50 + number);
        let source_dir = source.images_dir(migration);
        std::fs::create_dir(&source_dir).expect("writable");
        std::fs::write(source_dir.join("pages-1.img"), &content).expect("writable");
        target.images.expect_images(migration, host(1));
        let Daemon { images, net, .. } = &mut source;
        images.send_images(migration, host(2), net);
        // Each daemon must read its inputs; otherwise the other daemon would not make progress.
        let (mut source_input, mut target_input) = (None, None);
        while source_input.is_none() || target_input.is_none() {
            tokio::select! {
                input_result = timeout(STEP_TIMEOUT, source.wait_for_input()), if source_input.is_none() => source_input = Some(input_result.expect("in time")),
                input_result = timeout(STEP_TIMEOUT, target.wait_for_input()), if target_input.is_none() => target_input = Some(input_result.expect("in time")),
            }
        }
        let bytes = content.len() as u64;
        assert!(
            matches!(&source_input, Some(DaemonInput::Event(Event::ImagesSent { result: Ok(n), .. })) if *n == bytes),
            "{source_input:?}"
        );
        assert!(
            matches!(&target_input, Some(DaemonInput::Event(Event::ImagesReceived { result: Ok(n), .. })) if *n == bytes),
            "{target_input:?}"
        );
        assert_eq!(
            std::fs::read(target.images_dir(migration).join("pages-1.img")).expect("there"),
            content
        );
        target.images.drop_images(migration);
        source.images.drop_images(migration);
        target.wait_until_images_removed(migration).await;
    }
}

/// A session stream for an unexpected transfer is refused, and the session continues.
#[tokio::test(flavor = "multi_thread")]
async fn unexpected_bulk_stream_is_refused() {
    let (mut daemon1, mut daemon2) = connected_pair("uninvited", Duration::from_secs(10)).await;
    let (context, session) = daemon2
        .net
        .await_session(host(1))
        .wait_for_session()
        .await
        .expect("it stands");
    for content in [BulkContent::Images, BulkContent::Memory] {
        let purpose = StreamPurpose::BulkFallback(MigrationId(70), content);
        let (_send_stream, mut receive_stream) = open_bidirectional(&context, &session, purpose)
            .await
            .expect("a stream");
        let mut reply = [0; 1];
        tokio::select! {
            read_result = timeout(STEP_TIMEOUT, receive_stream.read_exact(&mut reply)) => assert!(matches!(read_result, Ok(Err(_))), "{read_result:?}"),
            input = daemon1.wait_for_input() => panic!("nobody has to know: {input:?}"),
        }
    }
    daemon2
        .net
        .send_control(daemon1.own_host, &commit_message(3));
    assert!(
        matches!(timeout(STEP_TIMEOUT, daemon1.wait_for_input()).await, Ok(DaemonInput::Control(m)) if m == commit_message(3))
    );
}

/// Images wait for a session that is being established. For an expelled host they fail immediately.
#[tokio::test(flavor = "multi_thread")]
async fn images_wait_for_pending_session() {
    let authority = Authority::new("pvm").expect("a key");
    let mut source = Daemon::start(
        "soon",
        1,
        &authority.issue(host(1)).expect("a key"),
        Duration::from_secs(10),
    );
    let mut target = Daemon::start(
        "soon",
        2,
        &authority.issue(host(2)).expect("a key"),
        Duration::from_secs(10),
    );
    let migration = MigrationId(6);
    let source_dir = source.images_dir(migration);
    std::fs::create_dir(&source_dir).expect("writable");
    std::fs::write(source_dir.join("core-1.img"), b"core").expect("writable");
    let Daemon { images, net, .. } = &mut source;
    net.expel_host(host(3));
    images.send_images(migration, host(3), net);
    let refusal = timeout(STEP_TIMEOUT, source.wait_for_input())
        .await
        .expect("in time");
    assert!(
        matches!(
            &refusal,
            DaemonInput::Event(Event::ImagesSent { result: Err(_), .. })
        ),
        "{refusal:?}"
    );

    target.images.expect_images(migration, host(1));
    let address = target.address();
    let Daemon { images, net, .. } = &mut source;
    // The host has just joined: the transfer begins before this daemon knows its address.
    images.send_images(migration, host(2), net);
    net.keep_connected(host(2), vec![address]);
    target
        .net
        .keep_connected(source.own_host, vec![source.address()]);
    tokio::join!(
        source.wait_for_session(host(2)),
        target.wait_for_session(host(1))
    );
    let (source_input, target_input) = tokio::join!(
        timeout(STEP_TIMEOUT, source.wait_for_input()),
        timeout(STEP_TIMEOUT, target.wait_for_input())
    );
    assert!(
        matches!(
            &source_input,
            Ok(DaemonInput::Event(Event::ImagesSent { result: Ok(4), .. }))
        ),
        "{source_input:?}"
    );
    assert!(
        matches!(
            &target_input,
            Ok(DaemonInput::Event(Event::ImagesReceived {
                result: Ok(4),
                ..
            }))
        ),
        "{target_input:?}"
    );
}

/// If the target drops images as soon as they have arrived, the source still reports the images as
/// sent.
#[tokio::test(flavor = "multi_thread")]
async fn images_dropped_on_arrival_count_as_sent() {
    let (mut source, mut target) = connected_pair("at-once", Duration::from_secs(10)).await;
    for number in 0..100 {
        let migration = MigrationId(100 + number);
        let source_dir = source.images_dir(migration);
        std::fs::create_dir(&source_dir).expect("writable");
        std::fs::write(source_dir.join("core-1.img"), b"core").expect("writable");
        target.images.expect_images(migration, host(1));
        let Daemon { images, net, .. } = &mut source;
        images.send_images(migration, host(2), net);
        let target_input = timeout(STEP_TIMEOUT, target.wait_for_input())
            .await
            .expect("in time");
        assert!(
            matches!(
                &target_input,
                DaemonInput::Event(Event::ImagesReceived { result: Ok(4), .. })
            ),
            "{target_input:?}"
        );
        target.images.drop_images(migration);
        let source_input = timeout(STEP_TIMEOUT, source.wait_for_input())
            .await
            .expect("in time");
        assert!(
            matches!(
                &source_input,
                DaemonInput::Event(Event::ImagesSent { result: Ok(4), .. })
            ),
            "{number}: {source_input:?}"
        );
        source.images.drop_images(migration);
    }
}

/// Images are sent while they are being written. Each of source and target may abort the transfer;
/// the other daemon then reports a failure.
#[tokio::test(flavor = "multi_thread")]
async fn growing_images_are_sent_and_either_end_may_abort() {
    for aborts_at_target in [true, false] {
        let (mut source, mut target) = connected_pair("ahead", Duration::from_secs(10)).await;
        let migration = MigrationId(5);
        let source_dir = source.images_dir(migration);
        std::fs::create_dir(&source_dir).expect("writable");
        std::fs::write(source_dir.join("pages-1.img"), vec![9; 1 << 20]).expect("writable");
        target.images.expect_images(migration, host(1));
        let Daemon { images, net, .. } = &mut source;
        images.start_streaming(migration, host(2), net);
        let target_file = target.images_dir(migration).join("pages-1.img");
        let arrival = async {
            while std::fs::metadata(&target_file).map_or(0, |meta| meta.len()) < 1 << 20 {
                // The daemon must read its inputs; otherwise the transfer would not make progress.
                let _ = timeout(Duration::from_millis(10), target.wait_for_input()).await;
            }
        };
        timeout(STEP_TIMEOUT, arrival)
            .await
            .expect("what is there is sent");
        let (aborting_daemon, other_daemon) = if aborts_at_target {
            (&mut target, &mut source)
        } else {
            (&mut source, &mut target)
        };
        aborting_daemon.images.drop_images(migration);
        aborting_daemon.wait_until_images_removed(migration).await;
        let other_input = timeout(STEP_TIMEOUT, other_daemon.wait_for_input()).await;
        let has_failed = matches!(
            &other_input,
            Ok(DaemonInput::Event(
                Event::ImagesSent { result: Err(_), .. }
                    | Event::ImagesReceived { result: Err(_), .. }
            ))
        );
        assert!(has_failed, "{other_input:?}");
        other_daemon.images.drop_images(migration);
        other_daemon.wait_until_images_removed(migration).await;
    }
}

impl Daemon {
    /// Waits until the images are removed. The images are removed when no thread uses them any
    /// more.
    async fn wait_until_images_removed(&self, migration: MigrationId) {
        let removal = async {
            while self.images_dir(migration).exists() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(STEP_TIMEOUT, removal)
            .await
            .expect("the images are removed");
    }

    fn images_dir(&self, migration: MigrationId) -> PathBuf {
        self.dir
            .join("sempa-0/pvm")
            .join(format!("images-{}", migration.0))
    }
}
