//! Tests post-copy and pre-copy between two taskers. The tests simulate the daemons: they forward
//! the memory stream, and can block or close it.

mod common;

use common::migration_steps::{self, compile_program, discard_and_wait, stop_and_wait};
use common::{Tasker, is_alive, migration_id, processes_with_text, tid, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::migration::{Failure, TaskFacts, Usage};
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Memory of the task in megabytes. The value is an argument of the test program.
const TASK_MEGABYTES_ARG: &str = "48";
/// Name of the file whose creation starts the additional work of a test program, for example forks.
const START_FILE_NAME: &str = "sign";
/// Environment that enables post-copy and pre-copy for tasks of any size. Pre-copy also needs an
/// order of the test.
const ALWAYS_ENV: [(&str, &str); 2] = [("SEMPA_POST_COPY", "always"), ("SEMPA_PRE_COPY", "always")];

/// Number of bytes that a blocked stream forwards. A restore needs some of them, because the kernel
/// writes into the task's memory.
const BLOCKED_STREAM_BYTES_MAX: usize = 8 << 20;

/// The forwarded memory stream. `BLOCKED_STREAM_BYTES_MAX` bytes are forwarded immediately, all
/// other data after the stream is opened.
struct MemoryStream {
    source_socket: PathBuf,
    target_socket: PathBuf,
    /// Number of bytes that may still be forwarded, and a condition variable for its changes.
    forwardable_bytes: Arc<(Mutex<usize>, Condvar)>,
    final_message: Arc<FinalMessage>,
}

/// State of the final message, with which the target confirms that all memory has arrived.
#[derive(Default)]
struct FinalMessage {
    /// True while the final message must not be forwarded.
    is_withheld: AtomicBool,
    /// True after the target has sent the final message.
    is_sent: AtomicBool,
    /// True after the target has closed its end of the stream.
    is_closed: AtomicBool,
}

impl FinalMessage {
    /// Command numbers of the final message. Versions of CRIU differ.
    const COMMANDS: [u32; 2] = [0x1023, 0x1024];
    /// Size in bytes of a page request. Versions of CRIU differ.
    const REQUEST_BYTES: [usize; 2] = [24, 32];

    /// True if `requests`, which contains requests of the target, ends with the final message.
    fn ends_requests(requests: &[u8]) -> bool {
        let last_starts = Self::REQUEST_BYTES
            .iter()
            .filter_map(|bytes| requests.len().checked_sub(*bytes));
        let mut commands = last_starts.filter_map(|start| requests[start..].first_chunk());
        commands.any(|command| Self::COMMANDS.contains(&u32::from_ne_bytes(*command)))
    }

    fn forward_requests(&self, mut target_stream: UnixStream, mut source_stream: UnixStream) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(length @ 1..) = target_stream.read(&mut bytes) {
            self.is_sent
                .fetch_or(Self::ends_requests(&bytes[..length]), Ordering::SeqCst);
            while self.is_withheld.load(Ordering::SeqCst) && self.is_sent.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if source_stream.write_all(&bytes[..length]).is_err() {
                break;
            }
        }
        self.is_closed.store(true, Ordering::SeqCst);
        let _ = source_stream.shutdown(std::net::Shutdown::Both);
    }
}

impl MemoryStream {
    fn new(dir: &Path) -> Self {
        let (source, target) = (dir.join("memory-source"), dir.join("memory-target"));
        let listeners = [&source, &target].map(|path| UnixListener::bind(path).expect("a socket"));
        let forwardable_bytes = Arc::new((Mutex::new(BLOCKED_STREAM_BYTES_MAX), Condvar::new()));
        let final_message = Arc::<FinalMessage>::default();
        let (thread_forwardable_bytes, thread_final_message) =
            (forwardable_bytes.clone(), final_message.clone());
        std::thread::spawn(move || {
            let [source_stream, target_stream] =
                listeners.map(|listener| listener.accept().expect("a tasker").0);
            let (requests, memory) = (
                target_stream.try_clone().expect("a copy"),
                source_stream.try_clone().expect("a copy"),
            );
            std::thread::spawn(move || {
                thread_final_message.forward_requests(requests, source_stream)
            });
            forward_limited(memory, target_stream, &thread_forwardable_bytes);
        });
        Self {
            source_socket: source,
            target_socket: target,
            forwardable_bytes,
            final_message,
        }
    }

    /// Opens the stream at a limited rate ([`SLOW_BYTES_PER_MS`]), so that some memory is always in
    /// transit.
    fn open_slowly(&self) {
        let forwardable_bytes = self.forwardable_bytes.clone();
        std::thread::spawn(move || {
            while Arc::strong_count(&forwardable_bytes) > 1 {
                *forwardable_bytes.0.lock().expect("no panic") += SLOW_BYTES_PER_MS;
                forwardable_bytes.1.notify_all();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }

    fn open(&self) {
        *self.forwardable_bytes.0.lock().expect("no panic") = usize::MAX;
        self.forwardable_bytes.1.notify_all();
    }

    /// Opens the stream but withholds the final message. Waits until the target has sent the final
    /// message.
    fn open_and_wait_for_final_message(&self) {
        self.final_message.is_withheld.store(true, Ordering::SeqCst);
        self.open();
        wait_until("it has everything", || {
            self.final_message.is_sent.load(Ordering::SeqCst)
        });
    }

    /// Forwards the final message, too.
    fn forward_final_message(&self) {
        self.final_message
            .is_withheld
            .store(false, Ordering::SeqCst);
    }

    /// Blocks the stream: only `BLOCKED_STREAM_BYTES_MAX` further bytes are forwarded.
    fn block(&self) {
        *self.forwardable_bytes.0.lock().expect("no panic") = BLOCKED_STREAM_BYTES_MAX;
    }
}

/// Number of bytes that are forwarded per millisecond if the stream is opened at a limited rate.
const SLOW_BYTES_PER_MS: usize = 64 << 10;

fn forward_limited(
    mut source_stream: UnixStream,
    mut target_stream: UnixStream,
    (forwardable_bytes, opened_condition): &(Mutex<usize>, Condvar),
) {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let permitted_bytes = *opened_condition
            .wait_while(
                forwardable_bytes.lock().expect("no panic"),
                |forwardable_bytes| *forwardable_bytes == 0,
            )
            .expect("no panic");
        let read_bytes_max = bytes.len().min(permitted_bytes);
        let Ok(length @ 1..) = source_stream.read(&mut bytes[..read_bytes_max]) else {
            break;
        };
        if target_stream.write_all(&bytes[..length]).is_err() {
            break;
        }
        *forwardable_bytes.lock().expect("no panic") -= length;
    }
    let _ = target_stream.shutdown(std::net::Shutdown::Both);
}

/// A fixture: a task that was dumped at the source and restored at the target without its memory.
/// The task is stopped on both hosts.
struct PostCopyFixture {
    dir: tempfile::TempDir,
    source: Tasker,
    target: Tasker,
    memory_stream: MemoryStream,
    restored_pid: i32,
}

impl PostCopyFixture {
    fn new() -> Self {
        Self::restored_program("pages")
    }

    /// Creates a fixture with a task that executes the program `name`.
    fn restored_program(name: &str) -> Self {
        let fixture = Self::start_task(name).dump_and_restore();
        std::fs::write(fixture.dir.path().join(START_FILE_NAME), "").expect("a file");
        fixture
    }

    /// Starts a task that executes the program `name`. The task still runs at the source.
    fn start_task(name: &str) -> Self {
        let dir = tempfile::tempdir().expect("dir");
        let (mut source, mut target) = (
            Tasker::start_with_env(&ALWAYS_ENV),
            Tasker::start_with_env(&ALWAYS_ENV),
        );
        let memory_stream = MemoryStream::new(dir.path());
        let start_file = dir.path().join(START_FILE_NAME);
        source.start_task_and_wait(
            tid(1),
            &compile_program(dir.path(), name),
            &[TASK_MEGABYTES_ARG, start_file.to_str().expect("text")],
        );
        source.wait_for_output(tid(1), &mut Vec::new(), |text| text.ends_with(b"\n"));
        source.send(ToTasker::Inspect {
            migration: migration_id(1),
            tid: tid(1),
        });
        let source_support = source.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::Inspected {
                result,
                supports_post_copy,
                supports_pre_copy,
                ..
            } => Some((result.clone(), *supports_post_copy, *supports_pre_copy)),
            _ => None,
        });
        assert!(
            source_support.1 && source_support.2,
            "it can follow, and go ahead: {:?}",
            source_support.0
        );
        target.send(ToTasker::Prepare {
            migration: migration_id(1),
            tid: tid(1),
            facts: TaskFacts::default(),
        });
        let target_support = target.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::Prepared {
                verdict,
                supports_post_copy,
                ..
            } => Some((verdict.clone(), *supports_post_copy)),
            _ => None,
        });
        assert_eq!(target_support, (vec![], true));
        Self {
            dir,
            source,
            target,
            memory_stream,
            restored_pid: 0,
        }
    }

    /// Pre-copies the task's memory. Returns the number of sent bytes.
    fn pre_copy_and_wait(&mut self) -> u64 {
        let (source_socket, target_socket) = (
            self.memory_stream.source_socket.clone(),
            self.memory_stream.target_socket.clone(),
        );
        self.target.send(ToTasker::ReceivePreCopy {
            migration: migration_id(1),
            memory_socket_path: target_socket,
        });
        self.source.send(ToTasker::PreCopy {
            migration: migration_id(1),
            tid: tid(1),
            memory_socket_path: source_socket,
        });
        self.memory_stream.open();
        let sent_bytes = self.source.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::PreCopied { result, .. } => Some(result.clone()),
            _ => None,
        });
        self.memory_stream.block();
        sent_bytes.expect("it is there")
    }

    /// Stops and dumps the task, and restores it at the target.
    fn dump_and_restore(self) -> Self {
        let Self {
            dir,
            source: mut source_tasker,
            target: mut target_tasker,
            memory_stream,
            ..
        } = self;
        stop_and_wait(&mut source_tasker, tid(1), migration_id(1), &mut Vec::new());
        let images = dir.path().join("images");
        let memory_socket = Some(memory_stream.source_socket.clone());
        source_tasker.send(ToTasker::Dump {
            migration: migration_id(1),
            tid: tid(1),
            image_dir: images.clone(),
            memory_socket_path: memory_socket,
        });
        let report = migration_steps::wait_until_dumped(&mut source_tasker, &mut Vec::new())
            .expect("a dump");
        assert!(
            report.image_bytes < 8 << 20,
            "the images lack the memory: {} bytes",
            report.image_bytes
        );
        let memory_socket = Some(memory_stream.target_socket.clone());
        target_tasker.send(ToTasker::Restore {
            migration: migration_id(1),
            tid: tid(1),
            image_dir: images,
            memory_write: None,
            memory_socket_path: memory_socket,
        });
        let restore_result = target_tasker.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::Restored { result, .. } => Some(result.clone()),
            _ => None,
        });
        let restored_pid = restore_result.expect("a restore");
        Self {
            dir,
            source: source_tasker,
            target: target_tasker,
            memory_stream,
            restored_pid,
        }
    }

    /// Kills the task at the source and runs it at the target, where most of its memory is missing.
    fn run_at_target(&mut self) {
        let usage = migration_steps::kill_source_and_wait(
            &mut self.source,
            tid(1),
            migration_id(1),
            &mut Vec::new(),
        );
        assert_ne!(usage, Usage::default());
        assert!(is_alive(self.restored_pid));
        migration_steps::run_and_wait(&mut self.target, migration_id(1), usage, &mut Vec::new());
    }

    fn wait_for_arrival(&mut self) -> (Result<(), Failure>, Vec<FromTasker>) {
        let mut messages = Vec::new();
        let result = self.target.wait_for_value(&mut messages, |m| match m {
            FromTasker::MemoryArrived { result, .. } => Some(result.clone()),
            _ => None,
        });
        (result, messages)
    }

    /// Asserts that the task at the target was killed and never read wrong data. `messages`
    /// contains earlier messages of the target.
    fn assert_killed(mut self, messages: Vec<FromTasker>) {
        let mut output = migration_steps::output_of(&messages, tid(1));
        let exit_status = |m: &FromTasker| match m {
            FromTasker::Exited { status, .. } => Some(*status),
            _ => None,
        };
        let mut later_messages = Vec::new();
        let status = messages
            .iter()
            .find_map(exit_status)
            .unwrap_or_else(|| self.target.wait_for_value(&mut later_messages, exit_status));
        output.extend(migration_steps::output_of(&later_messages, tid(1)));
        assert_eq!(status, 9, "{}", String::from_utf8_lossy(&output));
        assert!(!String::from_utf8_lossy(&output).contains("bad"));
        self.stop_and_wait();
    }

    /// Sends a signal to the process that fetches the task's memory.
    fn signal_fetcher(&self, signal: Signal) {
        let fetcher_pids =
            processes_with_text(&format!("lazy-pages -D {}", self.dir.path().display()));
        let [fetcher_pids] = fetcher_pids[..] else {
            panic!("one process fetches it: {fetcher_pids:?}")
        };
        kill(Pid::from_raw(fetcher_pids), signal).expect("it is there");
    }

    /// Waits until all memory has arrived. Asserts that the task continues at the target and never
    /// read wrong data.
    fn assert_arrives_and_continues(mut self) {
        let arrival = self.wait_for_arrival();
        self.assert_continues(arrival);
    }

    /// Asserts that all memory has arrived and that the task continues. The argument is the value
    /// of [`Self::wait_for_arrival`].
    fn assert_continues(mut self, (result, seen_messages): (Result<(), Failure>, Vec<FromTasker>)) {
        assert_eq!(result, Ok(()));
        let mut output = migration_steps::output_of(&seen_messages, tid(1));
        let line_count = migration_steps::count_lines(&output) + 100;
        self.target.wait_for_output(tid(1), &mut output, |text| {
            migration_steps::count_lines(text) > line_count
        });
        assert!(!String::from_utf8_lossy(&output).contains("bad"));
        self.target.send(ToTasker::Kill { tid: tid(1) });
        let (_, status, _) = self.target.wait_for_exit(tid(1));
        assert_eq!(status, 9);
        self.stop_and_wait();
    }

    fn stop_and_wait(self) {
        self.source.stop_and_wait();
        self.target.stop_and_wait();
        let dir_text = self.dir.path().display().to_string();
        wait_until("nothing is left", || {
            processes_with_text(&dir_text).is_empty()
        });
    }
}

/// A task runs at the target before its memory has arrived. The source's copy has been killed
/// before.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn post_copy_task_runs_before_its_memory_arrives() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::new();
    fixture.run_at_target();
    fixture.memory_stream.open();
    fixture.assert_arrives_and_continues();
}

/// After a pre-copy, at most a sixth of the task's memory is forwarded by post-copy. The task does
/// not fork, because missing pages of children are requested again.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn pre_copied_task_needs_few_pages_more() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::start_task("pages");
    let sent_bytes = fixture.pre_copy_and_wait();
    assert!(sent_bytes >= 48 << 20, "{sent_bytes} bytes went ahead");
    let mut fixture = fixture.dump_and_restore();
    fixture.run_at_target();
    fixture.assert_arrives_and_continues();
}

/// Guard pages, memory without permissions and memory of files survive post-copy.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unreadable_pages_survive_post_copy() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::restored_program("odd_memory");
    fixture.run_at_target();
    fixture.memory_stream.open();
    fixture.assert_arrives_and_continues();
}

/// The same memory survives a pre-copy.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unreadable_pages_survive_pre_copy() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::start_task("odd_memory");
    fixture.pre_copy_and_wait();
    let mut fixture = fixture.dump_and_restore();
    fixture.run_at_target();
    fixture.assert_arrives_and_continues();
}

/// A cancelled migration ends the pre-copy. The task continues at the source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn cancelled_migration_ends_the_pre_copy() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::start_task("pages");
    let (source_socket, target_socket) = (
        fixture.memory_stream.source_socket.clone(),
        fixture.memory_stream.target_socket.clone(),
    );
    fixture.target.send(ToTasker::ReceivePreCopy {
        migration: migration_id(1),
        memory_socket_path: target_socket,
    });
    // The stream is blocked after the first bytes.
    fixture.source.send(ToTasker::PreCopy {
        migration: migration_id(1),
        tid: tid(1),
        memory_socket_path: source_socket,
    });
    wait_until("some of it is there", || {
        *fixture
            .memory_stream
            .forwardable_bytes
            .0
            .lock()
            .expect("no panic")
            == 0
    });
    fixture.source.send(ToTasker::StopPreCopy {
        migration: migration_id(1),
    });
    discard_and_wait(&mut fixture.target, migration_id(1), &mut Vec::new());
    fixture.memory_stream.open();
    let mut output = Vec::new();
    fixture.source.wait_for_output(tid(1), &mut output, |text| {
        migration_steps::count_lines(text) > 100
    });
    assert!(!String::from_utf8_lossy(&output).contains("bad"));
    fixture.stop_and_wait();
}

/// If the target loses the pre-copied memory, it reports the loss and does not restore the task.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn lost_pre_copy_fails_the_restore() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::start_task("pages");
    fixture.pre_copy_and_wait();
    fixture.target.send(ToTasker::MemoryLost {
        migration: migration_id(1),
        reason: "the line is cut".into(),
    });
    let images = fixture.dir.path().join("none");
    let memory_socket = Some(fixture.memory_stream.target_socket.clone());
    fixture.target.send(ToTasker::Restore {
        migration: migration_id(1),
        tid: tid(1),
        image_dir: images,
        memory_write: None,
        memory_socket_path: memory_socket,
    });
    let mut messages = Vec::new();
    let restore_result = fixture.target.wait_for_value(&mut messages, |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(matches!(restore_result, Err(Failure::Images(why)) if why.contains("pre-copied")));
    let is_loss_report = |m: &FromTasker| matches!(m, FromTasker::PreCopyLost { failure: Failure::Images(why), .. } if why.contains("is cut"));
    assert!(messages.iter().any(is_loss_report), "{messages:?}");
    fixture.stop_and_wait();
}

/// Memory that a task unmaps during post-copy stays unmapped. All other memory arrives.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unmapped_pages_do_not_return_in_post_copy() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::restored_program("giver");
    fixture.run_at_target();
    let mut output = Vec::new();
    fixture.memory_stream.open_slowly();
    let (result, messages) = fixture.wait_for_arrival();
    assert_eq!(result, Ok(()));
    output.extend(migration_steps::output_of(&messages, tid(1)));
    let is_complete = |text: &[u8]| {
        ["right\n", "bad"]
            .iter()
            .any(|word| String::from_utf8_lossy(text).contains(word))
    };
    fixture
        .target
        .wait_for_output(tid(1), &mut output, is_complete);
    assert_eq!(
        output,
        b"gives\ngave\nright\n",
        "{}",
        String::from_utf8_lossy(&output)
    );
    fixture.target.send(ToTasker::Kill { tid: tid(1) });
    let (_, status, _) = fixture.target.wait_for_exit(tid(1));
    assert_eq!(status, 9);
    fixture.stop_and_wait();
}

/// A process whose memory is complete may fork while memory of other processes is still arriving.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_process_may_fork_in_post_copy() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::restored_program("family");
    fixture.run_at_target();
    fixture.memory_stream.open_slowly();
    fixture.assert_arrives_and_continues();
}

/// If the memory of a task does not arrive, the task is killed. The task never reads zeros in place
/// of its memory.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn missing_memory_ends_the_task_without_zeros() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::new();
    fixture.run_at_target();
    fixture.target.send(ToTasker::MemoryLost {
        migration: migration_id(1),
        reason: "the line is cut".into(),
    });
    let (result, messages) = fixture.wait_for_arrival();
    assert_eq!(result, Err(Failure::Images("the line is cut".into())));
    fixture.memory_stream.open();
    fixture.assert_killed(messages);
}

/// A task with complete memory continues, even if the stream ends before the final message.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_task_survives_a_closed_memory_stream() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::new();
    fixture.run_at_target();
    fixture.memory_stream.open_and_wait_for_final_message();
    fixture.target.send(ToTasker::MemoryLost {
        migration: migration_id(1),
        reason: "the line is cut".into(),
    });
    let arrival = fixture.wait_for_arrival();
    fixture.memory_stream.forward_final_message();
    fixture.assert_continues(arrival);
}

/// The tasker closes the memory stream when all memory has arrived, even if CRIU does not exit. The
/// test stops the fetching process after its final message.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_memory_closes_the_stream() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::new();
    fixture.run_at_target();
    fixture.memory_stream.open_and_wait_for_final_message();
    fixture.signal_fetcher(Signal::SIGSTOP);
    fixture.memory_stream.forward_final_message();
    wait_until("it is closed", || {
        fixture
            .memory_stream
            .final_message
            .is_closed
            .load(Ordering::SeqCst)
    });
    fixture.signal_fetcher(Signal::SIGCONT);
    fixture.assert_arrives_and_continues();
}

/// A task with complete memory continues, even if the process that fetches memory is killed.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_task_survives_a_killed_fetcher() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::new();
    fixture.run_at_target();
    fixture.memory_stream.open_and_wait_for_final_message();
    fixture.signal_fetcher(Signal::SIGKILL);
    let arrival = fixture.wait_for_arrival();
    fixture.memory_stream.forward_final_message();
    fixture.assert_continues(arrival);
}

/// If the process that fetches memory is killed, the task is killed. The task never reads zeros in
/// place of its memory.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn killed_fetcher_ends_the_task_without_zeros() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::new();
    fixture.run_at_target();
    fixture.signal_fetcher(Signal::SIGKILL);
    let (result, messages) = fixture.wait_for_arrival();
    assert_eq!(result, Err(Failure::Killed { signal: 9 }));
    fixture.memory_stream.open();
    fixture.assert_killed(messages);
}

/// If a migration is cancelled before the commit, the task continues at the source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn cancelled_post_copy_leaves_task_at_source() {
    migration_steps::require_migration();
    let mut fixture = PostCopyFixture::new();
    discard_and_wait(&mut fixture.target, migration_id(1), &mut Vec::new());
    assert!(!is_alive(fixture.restored_pid));
    let mut messages = Vec::new();
    migration_steps::continue_and_wait(&mut fixture.source, tid(1), migration_id(1), &mut messages);
    let mut output = migration_steps::output_of(&messages, tid(1));
    let line_count = migration_steps::count_lines(&output) + 100;
    fixture.source.wait_for_output(tid(1), &mut output, |text| {
        migration_steps::count_lines(text) > line_count
    });
    assert!(!String::from_utf8_lossy(&output).contains("bad"));
    fixture.memory_stream.open();
    fixture.stop_and_wait();
}
