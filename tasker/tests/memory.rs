//! Tests post-copy and pre-copy between two taskers. The test simulates the daemons: it forwards
//! the memory stream and can block or close it.

mod common;

use common::moving::{self, compile_program, discard, stop};
use common::{Tasker, is_alive, migration, processes_with, tid, wait_until};
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

/// Memory of the task in megabytes, as an argument of the program.
const TASK_MEGABYTES: &str = "48";
/// Name of the file whose creation starts the task's work during post-copy.
const START_FILE: &str = "sign";
/// Environment that enables post-copy for tasks of any size, and pre-copy if a test orders it.
const ALWAYS_ENV: [(&str, &str); 2] = [("SEMPA_POST_COPY", "always"), ("SEMPA_PRE_COPY", "always")];

/// Number of bytes that are forwarded before the stream is opened. A restore needs some of them,
/// because the kernel writes into the task's memory.
const FIRST_BYTES: usize = 8 << 20;

/// The forwarded memory stream: `FIRST_BYTES` are forwarded immediately, all other data when the
/// stream is opened.
struct MemoryStream {
    source: PathBuf,
    target: PathBuf,
    /// Number of bytes that may still be forwarded, and a condition variable for its changes.
    forwardable_bytes: Arc<(Mutex<usize>, Condvar)>,
    final_message: Arc<FinalMessage>,
}

/// State of the final message, by which the target confirms that all memory has arrived.
#[derive(Default)]
struct FinalMessage {
    /// True if the final message must not be forwarded.
    is_withheld: AtomicBool,
    /// True when the target has sent the final message.
    is_sent: AtomicBool,
    /// True when the target has closed its end of the stream.
    is_closed: AtomicBool,
}

impl FinalMessage {
    /// Command numbers of the final message, for two versions of CRIU.
    const COMMANDS: [u32; 2] = [0x1023, 0x1024];
    /// Size in bytes of a page request, for two versions of CRIU.
    const REQUEST_BYTES: [usize; 2] = [24, 32];

    /// True if `questions`, the target's requests, end with the final message.
    fn ends_requests(questions: &[u8]) -> bool {
        let last = FinalMessage::REQUEST_BYTES
            .iter()
            .filter_map(|bytes| questions.len().checked_sub(*bytes));
        let mut commands = last.filter_map(|at| questions[at..].first_chunk());
        commands.any(|command| FinalMessage::COMMANDS.contains(&u32::from_ne_bytes(*command)))
    }

    fn forward_requests(&self, mut from: UnixStream, mut to: UnixStream) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(length @ 1..) = from.read(&mut bytes) {
            self.is_sent.fetch_or(
                FinalMessage::ends_requests(&bytes[..length]),
                Ordering::SeqCst,
            );
            while self.is_withheld.load(Ordering::SeqCst) && self.is_sent.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if to.write_all(&bytes[..length]).is_err() {
                break;
            }
        }
        self.is_closed.store(true, Ordering::SeqCst);
        let _ = to.shutdown(std::net::Shutdown::Both);
    }
}

impl MemoryStream {
    fn new(dir: &Path) -> MemoryStream {
        let (source, target) = (dir.join("memory-source"), dir.join("memory-target"));
        let listeners = [&source, &target].map(|path| UnixListener::bind(path).expect("a socket"));
        let gate = Arc::new((Mutex::new(FIRST_BYTES), Condvar::new()));
        let leave = Arc::<FinalMessage>::default();
        let (of_thread, of_questions) = (gate.clone(), leave.clone());
        std::thread::spawn(move || {
            let [here, there] = listeners.map(|listener| listener.accept().expect("a tasker").0);
            let (asks, answers) = (
                there.try_clone().expect("a copy"),
                here.try_clone().expect("a copy"),
            );
            std::thread::spawn(move || of_questions.forward_requests(asks, here));
            forward_limited(answers, there, &of_thread);
        });
        MemoryStream {
            source,
            target,
            forwardable_bytes: gate,
            final_message: leave,
        }
    }

    /// Opens the stream at a limited rate, so that some memory is always in transit.
    fn open_slowly(&self) {
        let gate = self.forwardable_bytes.clone();
        std::thread::spawn(move || {
            while Arc::strong_count(&gate) > 1 {
                *gate.0.lock().expect("no panic") += SLOW_BYTES_PER_MS;
                gate.1.notify_all();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }

    fn open(&self) {
        *self.forwardable_bytes.0.lock().expect("no panic") = usize::MAX;
        self.forwardable_bytes.1.notify_all();
    }

    /// Opens the stream but withholds the final message, and waits until the target has sent that
    /// message.
    fn open_until_final_message(&self) {
        self.final_message.is_withheld.store(true, Ordering::SeqCst);
        self.open();
        wait_until("it has everything", || {
            self.final_message.is_sent.load(Ordering::SeqCst)
        });
    }

    /// Forwards the final message as well.
    fn forward_final_message(&self) {
        self.final_message
            .is_withheld
            .store(false, Ordering::SeqCst);
    }

    /// Blocks the stream as at the start of the test.
    fn block(&self) {
        *self.forwardable_bytes.0.lock().expect("no panic") = FIRST_BYTES;
    }
}

/// Number of bytes that are forwarded per millisecond if the stream is opened at a limited rate.
const SLOW_BYTES_PER_MS: usize = 64 << 10;

fn forward_limited(
    mut from: UnixStream,
    mut to: UnixStream,
    (left, opened): &(Mutex<usize>, Condvar),
) {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let may = *opened
            .wait_while(left.lock().expect("no panic"), |left| *left == 0)
            .expect("no panic");
        let room = bytes.len().min(may);
        let Ok(length @ 1..) = from.read(&mut bytes[..room]) else {
            break;
        };
        if to.write_all(&bytes[..length]).is_err() {
            break;
        }
        *left.lock().expect("no panic") -= length;
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// A task that was dumped at the source and restored at the target without its memory. The task is
/// stopped on both hosts.
struct Scene {
    dir: tempfile::TempDir,
    here: Tasker,
    there: Tasker,
    memory_stream: MemoryStream,
    restored_pid: i32,
}

impl Scene {
    fn new() -> Scene {
        Scene::with_program("pages")
    }

    /// Creates a scene with a task that runs the program `name`.
    fn with_program(name: &str) -> Scene {
        let scene = Scene::begin(name).dump_and_restore();
        std::fs::write(scene.dir.path().join(START_FILE), "").expect("a file");
        scene
    }

    /// Starts a task with the program `name`, which still runs at the source.
    fn begin(name: &str) -> Scene {
        let dir = tempfile::tempdir().expect("dir");
        let (mut here, mut there) = (
            Tasker::start_with_env(&ALWAYS_ENV),
            Tasker::start_with_env(&ALWAYS_ENV),
        );
        let way = MemoryStream::new(dir.path());
        let sign = dir.path().join(START_FILE);
        here.run(
            tid(1),
            &compile_program(dir.path(), name),
            &[TASK_MEGABYTES, sign.to_str().expect("text")],
        );
        here.wait_for_output(tid(1), &mut Vec::new(), |text| text.ends_with(b"\n"));
        here.send(ToTasker::Inspect {
            migration: migration(1),
            tid: tid(1),
        });
        let inspected = here.wait_for(&mut Vec::new(), |m| match m {
            FromTasker::Inspected {
                result,
                supports_post_copy: memory_can_follow,
                supports_pre_copy: can_pre_copy,
                ..
            } => Some((result.clone(), *memory_can_follow, *can_pre_copy)),
            _ => None,
        });
        assert!(
            inspected.1 && inspected.2,
            "it can follow, and go ahead: {:?}",
            inspected.0
        );
        there.send(ToTasker::Prepare {
            migration: migration(1),
            tid: tid(1),
            facts: TaskFacts::default(),
        });
        let prepared = there.wait_for(&mut Vec::new(), |m| match m {
            FromTasker::Prepared {
                verdict,
                supports_post_copy: memory_can_follow,
                ..
            } => Some((verdict.clone(), *memory_can_follow)),
            _ => None,
        });
        assert_eq!(prepared, (vec![], true));
        Scene {
            dir,
            here,
            there,
            memory_stream: way,
            restored_pid: 0,
        }
    }

    /// Pre-copies the task's memory and returns the number of bytes.
    fn pre_copy(&mut self) -> u64 {
        let (source, target) = (
            self.memory_stream.source.clone(),
            self.memory_stream.target.clone(),
        );
        self.there.send(ToTasker::ReceivePreCopy {
            migration: migration(1),
            memory_socket: target,
        });
        self.here.send(ToTasker::PreCopy {
            migration: migration(1),
            tid: tid(1),
            memory_socket: source,
        });
        self.memory_stream.open();
        let went = self.here.wait_for(&mut Vec::new(), |m| match m {
            FromTasker::PreCopied { result, .. } => Some(result.clone()),
            _ => None,
        });
        self.memory_stream.block();
        went.expect("it is there")
    }

    /// Stops and dumps the task, and restores it at the target.
    fn dump_and_restore(self) -> Scene {
        let Scene {
            dir,
            mut here,
            mut there,
            memory_stream: way,
            ..
        } = self;
        stop(&mut here, tid(1), migration(1), &mut Vec::new());
        let images = dir.path().join("images");
        let memory_way = Some(way.source.clone());
        here.send(ToTasker::Dump {
            migration: migration(1),
            tid: tid(1),
            dir: images.clone(),
            memory_socket: memory_way,
        });
        let report = moving::wait_until_dumped(&mut here, &mut Vec::new()).expect("a dump");
        assert!(
            report.bytes < 8 << 20,
            "the images lack the memory: {} bytes",
            report.bytes
        );
        let memory_way = Some(way.target.clone());
        there.send(ToTasker::Restore {
            migration: migration(1),
            tid: tid(1),
            dir: images,
            memory_write: None,
            memory_socket: memory_way,
        });
        let restored = there.wait_for(&mut Vec::new(), |m| match m {
            FromTasker::Restored { result, .. } => Some(result.clone()),
            _ => None,
        });
        let copy = restored.expect("a restore");
        Scene {
            dir,
            here,
            there,
            memory_stream: way,
            restored_pid: copy,
        }
    }

    /// Kills the task at the source and runs it at the target; most of its memory is missing.
    fn commit(&mut self) {
        let used = moving::kill_migrated(&mut self.here, tid(1), migration(1), &mut Vec::new());
        assert_ne!(used, Usage::default());
        assert!(is_alive(self.restored_pid));
        moving::run(&mut self.there, migration(1), used, &mut Vec::new());
    }

    fn wait_for_arrival(&mut self) -> (Result<(), Failure>, Vec<FromTasker>) {
        let mut seen = Vec::new();
        let result = self.there.wait_for(&mut seen, |m| match m {
            FromTasker::MemoryArrived { result, .. } => Some(result.clone()),
            _ => None,
        });
        (result, seen)
    }

    /// Asserts that the task at the target was killed and never read a wrong word.
    fn assert_killed(mut self, seen: Vec<FromTasker>) {
        let mut output = moving::output_of(&seen, tid(1));
        let exited = |m: &FromTasker| match m {
            FromTasker::Exited { status, .. } => Some(*status),
            _ => None,
        };
        let mut rest = Vec::new();
        let status = seen
            .iter()
            .find_map(exited)
            .unwrap_or_else(|| self.there.wait_for(&mut rest, exited));
        output.extend(moving::output_of(&rest, tid(1)));
        assert_eq!(status, 9, "{}", String::from_utf8_lossy(&output));
        assert!(!String::from_utf8_lossy(&output).contains("bad"));
        self.end();
    }

    /// Sends a signal to the process that fetches the task's memory.
    fn signal_fetcher(&self, signal: Signal) {
        let fetching = processes_with(&format!("lazy-pages -D {}", self.dir.path().display()));
        let [fetching] = fetching[..] else {
            panic!("one process fetches it: {fetching:?}")
        };
        kill(Pid::from_raw(fetching), signal).expect("it is there");
    }

    /// Waits for all memory, and asserts that the task at the target continues and never read a
    /// wrong word.
    fn assert_arrives_and_continues(mut self) {
        let arrived = self.wait_for_arrival();
        self.assert_continues(arrived);
    }

    /// Asserts that all memory has arrived and that the task continues.
    fn assert_continues(mut self, (result, seen): (Result<(), Failure>, Vec<FromTasker>)) {
        assert_eq!(result, Ok(()));
        let mut output = moving::output_of(&seen, tid(1));
        let more = moving::count_lines(&output) + 100;
        self.there
            .wait_for_output(tid(1), &mut output, |text| moving::count_lines(text) > more);
        assert!(!String::from_utf8_lossy(&output).contains("bad"));
        self.there.send(ToTasker::Kill { tid: tid(1) });
        let (_, status, _) = self.there.wait_for_exit(tid(1));
        assert_eq!(status, 9);
        self.end();
    }

    fn end(self) {
        self.here.stop();
        self.there.stop();
        let left = self.dir.path().display().to_string();
        wait_until("nothing is left", || processes_with(&left).is_empty());
    }
}

/// A task runs at the target before its memory arrives. At that time it no longer exists at the
/// source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn post_copy_task_runs_before_its_memory_arrives() {
    moving::require_migration();
    let mut scene = Scene::new();
    scene.commit();
    scene.memory_stream.open();
    scene.assert_arrives_and_continues();
}

/// After a pre-copy a task needs little memory from the source: at most a sixth of its memory is
/// forwarded in the stream. The task does not fork, because missing pages of children are requested
/// again.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn pre_copied_task_needs_few_pages_more() {
    moving::require_migration();
    let mut scene = Scene::begin("pages");
    let went = scene.pre_copy();
    assert!(went >= 48 << 20, "{went} bytes went ahead");
    let mut scene = scene.dump_and_restore();
    scene.commit();
    scene.assert_arrives_and_continues();
}

/// A cancelled migration ends the pre-copy, and the task continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn cancelled_migration_ends_the_pre_copy() {
    moving::require_migration();
    let mut scene = Scene::begin("pages");
    let (source, target) = (
        scene.memory_stream.source.clone(),
        scene.memory_stream.target.clone(),
    );
    scene.there.send(ToTasker::ReceivePreCopy {
        migration: migration(1),
        memory_socket: target,
    });
    // The stream is blocked after the first bytes.
    scene.here.send(ToTasker::PreCopy {
        migration: migration(1),
        tid: tid(1),
        memory_socket: source,
    });
    wait_until("some of it is there", || {
        *scene
            .memory_stream
            .forwardable_bytes
            .0
            .lock()
            .expect("no panic")
            == 0
    });
    scene.here.send(ToTasker::StopPreCopy {
        migration: migration(1),
    });
    discard(&mut scene.there, migration(1), &mut Vec::new());
    scene.memory_stream.open();
    let mut output = Vec::new();
    scene
        .here
        .wait_for_output(tid(1), &mut output, |text| moving::count_lines(text) > 100);
    assert!(!String::from_utf8_lossy(&output).contains("bad"));
    scene.end();
}

/// A target that loses the pre-copied memory reports the loss and does not restore the task.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn lost_pre_copy_fails_the_restore() {
    moving::require_migration();
    let mut scene = Scene::begin("pages");
    scene.pre_copy();
    scene.there.send(ToTasker::MemoryLost {
        migration: migration(1),
        why: "the line is cut".into(),
    });
    let images = scene.dir.path().join("none");
    let memory_way = Some(scene.memory_stream.target.clone());
    scene.there.send(ToTasker::Restore {
        migration: migration(1),
        tid: tid(1),
        dir: images,
        memory_write: None,
        memory_socket: memory_way,
    });
    let mut said = Vec::new();
    let restored = scene.there.wait_for(&mut said, |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(matches!(restored, Err(Failure::Images(why)) if why.contains("ahead")));
    let lost = |m: &FromTasker| matches!(m, FromTasker::PreCopyLost { why: Failure::Images(why), .. } if why.contains("is cut"));
    assert!(said.iter().any(lost), "{said:?}");
    scene.end();
}

/// Memory that a task unmaps during post-copy stays unmapped, and all other memory arrives.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unmapped_pages_do_not_return_in_post_copy() {
    moving::require_migration();
    let mut scene = Scene::with_program("giver");
    scene.commit();
    let mut output = Vec::new();
    scene.memory_stream.open_slowly();
    let (result, seen) = scene.wait_for_arrival();
    assert_eq!(result, Ok(()));
    output.extend(moving::output_of(&seen, tid(1)));
    let done = |text: &[u8]| {
        ["right\n", "bad"]
            .iter()
            .any(|word| String::from_utf8_lossy(text).contains(word))
    };
    scene.there.wait_for_output(tid(1), &mut output, done);
    assert_eq!(
        output,
        b"gives\ngave\nright\n",
        "{}",
        String::from_utf8_lossy(&output)
    );
    scene.there.send(ToTasker::Kill { tid: tid(1) });
    let (_, status, _) = scene.there.wait_for_exit(tid(1));
    assert_eq!(status, 9);
    scene.end();
}

/// A process whose memory is complete may fork while memory of other processes is still arriving.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_process_may_fork_in_post_copy() {
    moving::require_migration();
    let mut scene = Scene::with_program("family");
    scene.commit();
    scene.memory_stream.open_slowly();
    scene.assert_arrives_and_continues();
}

/// A task whose memory does not arrive ends. It never reads zeros in place of its memory.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn missing_memory_ends_the_task_without_zeros() {
    moving::require_migration();
    let mut scene = Scene::new();
    scene.commit();
    scene.there.send(ToTasker::MemoryLost {
        migration: migration(1),
        why: "the line is cut".into(),
    });
    let (result, seen) = scene.wait_for_arrival();
    assert_eq!(result, Err(Failure::Images("the line is cut".into())));
    scene.memory_stream.open();
    scene.assert_killed(seen);
}

/// A task that has all its memory continues if the stream ends before the final message.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_task_survives_a_closed_memory_stream() {
    moving::require_migration();
    let mut scene = Scene::new();
    scene.commit();
    scene.memory_stream.open_until_final_message();
    scene.there.send(ToTasker::MemoryLost {
        migration: migration(1),
        why: "the line is cut".into(),
    });
    let arrived = scene.wait_for_arrival();
    scene.memory_stream.forward_final_message();
    scene.assert_continues(arrived);
}

/// The memory stream is closed when all memory has arrived, even if CRIU does not exit. The
/// fetching process is stopped after its final message.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_memory_closes_the_stream() {
    moving::require_migration();
    let mut scene = Scene::new();
    scene.commit();
    scene.memory_stream.open_until_final_message();
    scene.signal_fetcher(Signal::SIGSTOP);
    scene.memory_stream.forward_final_message();
    wait_until("it is closed", || {
        scene
            .memory_stream
            .final_message
            .is_closed
            .load(Ordering::SeqCst)
    });
    scene.signal_fetcher(Signal::SIGCONT);
    scene.assert_arrives_and_continues();
}

/// A task that has all its memory continues if the process that fetches memory is killed.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_task_survives_a_killed_fetcher() {
    moving::require_migration();
    let mut scene = Scene::new();
    scene.commit();
    scene.memory_stream.open_until_final_message();
    scene.signal_fetcher(Signal::SIGKILL);
    let arrived = scene.wait_for_arrival();
    scene.memory_stream.forward_final_message();
    scene.assert_continues(arrived);
}

/// If the process that fetches memory is killed, the task ends. It never reads zeros in place of
/// its memory.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn killed_fetcher_ends_the_task_without_zeros() {
    moving::require_migration();
    let mut scene = Scene::new();
    scene.commit();
    scene.signal_fetcher(Signal::SIGKILL);
    let (result, seen) = scene.wait_for_arrival();
    assert_eq!(result, Err(Failure::Killed { signal: 9 }));
    scene.memory_stream.open();
    scene.assert_killed(seen);
}

/// A migration that is cancelled before the commit leaves the task at the source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn cancelled_post_copy_leaves_task_at_source() {
    moving::require_migration();
    let mut scene = Scene::new();
    discard(&mut scene.there, migration(1), &mut Vec::new());
    assert!(!is_alive(scene.restored_pid));
    let mut seen = Vec::new();
    moving::continue_task(&mut scene.here, tid(1), migration(1), &mut seen);
    let mut output = moving::output_of(&seen, tid(1));
    let more = moving::count_lines(&output) + 100;
    scene
        .here
        .wait_for_output(tid(1), &mut output, |text| moving::count_lines(text) > more);
    assert!(!String::from_utf8_lossy(&output).contains("bad"));
    scene.memory_stream.open();
    scene.end();
}
