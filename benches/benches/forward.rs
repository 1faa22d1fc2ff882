//! Measures how the daemon forwards a data frame of a task: the state machine from the input event
//! to the output and, between hosts, also the queues and pair streams of the data channel. No I/O
//! is done.

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

/// Numbers of tasks on the host. The cost of forwarding must not depend on it.
const TASKS: [usize; 3] = [2, 32, 512];
/// Payload sizes of the frames, in bytes.
const PAYLOADS: [usize; 2] = [64, 60 << 10];
/// Payload size in bytes for benchmarks of which the time does not depend on the size, because the
/// payload is not read.
const SMALL_PAYLOAD: usize = 64;
/// Number of unmeasured frames at the start, in which the daemon makes the table entries and the
/// stream of the pair.
const WARM_UP_FRAMES: usize = 100;

/// Counts allocations. `bench micro` fails if the forwarding path allocates.
#[global_allocator]
static ALLOCATIONS: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

fn data_frame(ends: (Tid, Tid), bytes: usize) -> Bytes {
    frame(
        &mut BytesMut::new(),
        ends,
        LinkKind::Data { last: true },
        1,
        &vec![7; bytes],
    )
}

/// Measures `once`, after [`WARM_UP_FRAMES`] calls that are not measured.
fn measure<T>(bencher: Bencher, mut once: impl FnMut() -> T) {
    (0..WARM_UP_FRAMES).for_each(|_| drop(once()));
    bencher.counter(ItemsCount::new(1usize)).bench_local(once);
}

/// Measures how a daemon handles `event`. Panics unless `is_expected` accepts the daemon's
/// first output.
fn measure_forwarding(
    bencher: Bencher,
    mut daemon: Daemon,
    event: impl Fn() -> Event,
    is_expected: impl Fn(&Output) -> bool,
) {
    measure(bencher, || {
        daemon.handle(event());
        let output = daemon.poll();
        assert!(
            output.as_ref().is_some_and(&is_expected),
            "it is forwarded: {output:?}"
        );
        output
    });
}

#[divan::bench(args = TASKS)]
fn a_frame_between_two_tasks(bencher: Bencher, tasks: usize) {
    let daemon = Daemon::new(tasks);
    let frame = data_frame((daemon.tids[0], daemon.tids[tasks - 1]), SMALL_PAYLOAD);
    let event = || Event::TaskLink {
        conn: Daemon::conn(0),
        frame: frame.clone(),
    };
    measure_forwarding(bencher, daemon, event, |output| {
        matches!(output, Output::LinkToTask { .. })
    });
}

#[divan::bench(args = TASKS)]
fn a_frame_to_another_host(bencher: Bencher, tasks: usize) {
    let daemon = Daemon::new(tasks);
    let frame = data_frame((daemon.tids[0], remote_task()), SMALL_PAYLOAD);
    let event = || Event::TaskLink {
        conn: Daemon::conn(0),
        frame: frame.clone(),
    };
    measure_forwarding(bencher, daemon, event, |output| {
        matches!(output, Output::SendData { .. })
    });
}

#[divan::bench(args = TASKS)]
fn a_frame_from_another_host(bencher: Bencher, tasks: usize) {
    let daemon = Daemon::new(tasks);
    let frame = data_frame((remote_task(), daemon.tids[tasks - 1]), SMALL_PAYLOAD);
    let event = || Event::HostData {
        host: HostId::MASTER,
        message: DataMsg::Frame(frame.clone()),
    };
    measure_forwarding(bencher, daemon, event, |output| {
        matches!(output, Output::LinkToTask { .. })
    });
}

/// Measures a frame from the task's socket until it is in the stream of its pair.
#[divan::bench(args = PAYLOADS)]
fn queued_to_another_host(bencher: Bencher, bytes: usize) {
    let (mut daemon, mut sending) = (Daemon::new(1), BenchSender::default());
    let frame = data_frame((daemon.tids[0], remote_task()), bytes);
    measure(bencher, || {
        daemon.handle(Event::TaskLink {
            conn: Daemon::conn(0),
            frame: frame.clone(),
        });
        match daemon.poll() {
            Some(Output::SendData {
                message: DataMsg::Frame(frame),
                ..
            }) => sending.send(frame).len(),
            other => panic!("it is forwarded: {other:?}"),
        }
    });
    assert_eq!(
        sending.send(frame).len(),
        2,
        "it has a head and goes down a lane"
    );
}

/// Measures a frame from the stream of its pair until it is sent to the task's socket.
#[divan::bench(args = PAYLOADS)]
fn unqueued_from_another_host(bencher: Bencher, bytes: usize) {
    let (mut daemon, mut sending, mut receiving) = (
        Daemon::new(1),
        BenchSender::default(),
        BenchReceiver::default(),
    );
    let frame = data_frame((remote_task(), daemon.tids[0]), bytes);
    for _ in 0..WARM_UP_FRAMES {
        sending.send(frame.clone());
    }
    let chunks = sending.send(frame).to_vec();
    measure(bencher, || {
        let message = receiving.receive(&chunks).expect("a whole frame");
        daemon.handle(Event::HostData {
            host: HostId::MASTER,
            message,
        });
        let output = daemon.poll();
        assert!(
            matches!(output, Some(Output::LinkToTask { .. })),
            "it is forwarded: {output:?}"
        );
        output
    });
}
