//! Measures how the daemon forwards a data frame of a task. The measured path is the state machine
//! from the input event to the output and, between hosts, also the queues and pair streams of the
//! data channel. The benchmark does no I/O.

#[path = "../../pvmd/machine/tests/two_host_daemon/mod.rs"]
mod two_host_daemon;

use bytes::{Bytes, BytesMut};
use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher};
use pvmd::shell::bench_hooks::{BenchReceiver, BenchSender};
use pvmd_machine::{Event, Output};
use sempa_proto::host::DataMsg;
use sempa_proto::link::LinkKind;
use sempa_proto::{HostId, Tid};
use two_host_daemon::{Daemon, frame, remote_task};

/// Numbers of tasks on the host. The time of forwarding must not depend on the number of tasks.
const TASK_COUNTS: [usize; 3] = [2, 32, 512];
/// Payload sizes of the frames, in bytes.
const PAYLOAD_SIZES: [usize; 2] = [64, 60 << 10];
/// Payload size in bytes for benchmarks of paths that do not read the payload. The time of these
/// paths does not depend on the size.
const SMALL_PAYLOAD_BYTES: usize = 64;
/// Number of unmeasured frames at the start. These frames make the daemon create its table entries
/// and the stream of the pair.
const WARM_UP_FRAME_COUNT: usize = 100;

/// Counts allocations. `bench micro` fails if the forwarding path allocates more often than
/// permitted.
#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

fn data_frame(sender_and_receiver: (Tid, Tid), payload_bytes: usize) -> Bytes {
    frame(
        &mut BytesMut::new(),
        sender_and_receiver,
        LinkKind::Data { is_last: true },
        1,
        &vec![7; payload_bytes],
    )
}

/// Measures calls of `operation`, after [`WARM_UP_FRAME_COUNT`] calls that are not measured.
fn warm_up_and_measure<T>(bencher: Bencher, mut operation: impl FnMut() -> T) {
    (0..WARM_UP_FRAME_COUNT).for_each(|_| drop(operation()));
    bencher
        .counter(ItemsCount::new(1usize))
        .bench_local(operation);
}

/// Measures the time from the event that `event` returns to the first output of `daemon`.
///
/// # Panics
/// `is_expected` does not accept the daemon's first output.
fn measure_forwarding(
    bencher: Bencher,
    mut daemon: Daemon,
    event: impl Fn() -> Event,
    is_expected: impl Fn(&Output) -> bool,
) {
    warm_up_and_measure(bencher, || {
        daemon.handle(event());
        let output = daemon.poll();
        assert!(
            output.as_ref().is_some_and(&is_expected),
            "it is forwarded: {output:?}"
        );
        output
    });
}

#[divan::bench(args = TASK_COUNTS)]
fn a_frame_between_two_tasks(bencher: Bencher, task_count: usize) {
    let daemon = Daemon::new(task_count);
    let frame = data_frame(
        (daemon.tids[0], daemon.tids[task_count - 1]),
        SMALL_PAYLOAD_BYTES,
    );
    let event = || Event::TaskLink {
        conn: Daemon::conn(0),
        frame: frame.clone(),
    };
    measure_forwarding(bencher, daemon, event, |output| {
        matches!(output, Output::SendFrameToTask { .. })
    });
}

#[divan::bench(args = TASK_COUNTS)]
fn a_frame_to_another_host(bencher: Bencher, task_count: usize) {
    let daemon = Daemon::new(task_count);
    let frame = data_frame((daemon.tids[0], remote_task()), SMALL_PAYLOAD_BYTES);
    let event = || Event::TaskLink {
        conn: Daemon::conn(0),
        frame: frame.clone(),
    };
    measure_forwarding(bencher, daemon, event, |output| {
        matches!(output, Output::SendData { .. })
    });
}

#[divan::bench(args = TASK_COUNTS)]
fn a_frame_from_another_host(bencher: Bencher, task_count: usize) {
    let daemon = Daemon::new(task_count);
    let frame = data_frame(
        (remote_task(), daemon.tids[task_count - 1]),
        SMALL_PAYLOAD_BYTES,
    );
    let event = || Event::HostData {
        host: HostId::MASTER,
        message: DataMsg::Frame(frame.clone()),
    };
    measure_forwarding(bencher, daemon, event, |output| {
        matches!(output, Output::SendFrameToTask { .. })
    });
}

/// Measures the path of a frame from the event of the task's socket to the stream of the pair of
/// tasks.
#[divan::bench(args = PAYLOAD_SIZES)]
fn queued_to_another_host(bencher: Bencher, payload_bytes: usize) {
    let (mut daemon, mut sender) = (Daemon::new(1), BenchSender::default());
    let frame = data_frame((daemon.tids[0], remote_task()), payload_bytes);
    warm_up_and_measure(bencher, || {
        daemon.handle(Event::TaskLink {
            conn: Daemon::conn(0),
            frame: frame.clone(),
        });
        match daemon.poll() {
            Some(Output::SendData {
                message: DataMsg::Frame(frame),
                ..
            }) => sender.send(frame).len(),
            other => panic!("it is forwarded: {other:?}"),
        }
    });
    assert_eq!(
        sender.send(frame).len(),
        2,
        "it has a head and goes down a lane"
    );
}

/// Measures the path of a frame from the stream of the pair of tasks to the output for the task's
/// socket.
#[divan::bench(args = PAYLOAD_SIZES)]
fn unqueued_from_another_host(bencher: Bencher, payload_bytes: usize) {
    let (mut daemon, mut sender, mut receiver) = (
        Daemon::new(1),
        BenchSender::default(),
        BenchReceiver::default(),
    );
    let frame = data_frame((remote_task(), daemon.tids[0]), payload_bytes);
    for _ in 0..WARM_UP_FRAME_COUNT {
        sender.send(frame.clone());
    }
    let chunks = sender.send(frame).to_vec();
    warm_up_and_measure(bencher, || {
        let message = receiver.receive(&chunks).expect("a whole frame");
        daemon.handle(Event::HostData {
            host: HostId::MASTER,
            message,
        });
        let output = daemon.poll();
        assert!(
            matches!(output, Some(Output::SendFrameToTask { .. })),
            "it is forwarded: {output:?}"
        );
        output
    });
}
