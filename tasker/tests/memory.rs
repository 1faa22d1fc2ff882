//! Tests of post-copy and pre-copy with two taskers. The test plays the daemons: it forwards the
//! memory stream and can block or cut it.

mod common;

use common::moving::{self, discard, program, stop};
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

/// Memory of the task in megabytes.
const MEGABYTES: &str = "48";
/// The file whose creation starts the task's work during post-copy.
const SIGN: &str = "sign";
/// Enables post-copy for tasks of any size, and pre-copy if a test orders it.
const ALWAYS: [(&str, &str); 2] = [("SEMPA_POST_COPY", "always"), ("SEMPA_PRE_COPY", "always")];

/// Bytes that pass before the stream is opened. A restore needs some: the kernel writes into the
/// task's memory.
const FIRST_BYTES: usize = 8 << 20;

/// The forwarded memory stream: `FIRST_BYTES` at once, the rest when it is opened.
struct Way {
    source: PathBuf,
    target: PathBuf,
    /// Bytes that may still pass.
    gate: Arc<(Mutex<usize>, Condvar)>,
    leave: Arc<Leave>,
}

/// State of the message by which the target confirms that all memory has arrived.
#[derive(Default)]
struct Leave {
    /// The message must not pass.
    stays: AtomicBool,
    /// The target has sent the message.
    is_said: AtomicBool,
    /// The target has closed its end.
    is_closed: AtomicBool,
}

impl Leave {
    /// Commands of that message, for two versions of CRIU.
    const WORDS: [u32; 2] = [0x1023, 0x1024];
    /// Bytes of a page request, for two versions of CRIU.
    const QUESTION_BYTES: [usize; 2] = [24, 32];

    /// True if the requests end with that message.
    fn is_in(questions: &[u8]) -> bool {
        let last = Leave::QUESTION_BYTES
            .iter()
            .filter_map(|bytes| questions.len().checked_sub(*bytes));
        let mut commands = last.filter_map(|at| questions[at..].first_chunk());
        commands.any(|command| Leave::WORDS.contains(&u32::from_ne_bytes(*command)))
    }

    fn pass_questions(&self, mut from: UnixStream, mut to: UnixStream) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(length @ 1..) = from.read(&mut bytes) {
            self.is_said
                .fetch_or(Leave::is_in(&bytes[..length]), Ordering::SeqCst);
            while self.stays.load(Ordering::SeqCst) && self.is_said.load(Ordering::SeqCst) {
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

impl Way {
    fn new(dir: &Path) -> Way {
        let (source, target) = (dir.join("memory-source"), dir.join("memory-target"));
        let listeners = [&source, &target].map(|path| UnixListener::bind(path).expect("a socket"));
        let gate = Arc::new((Mutex::new(FIRST_BYTES), Condvar::new()));
        let leave = Arc::<Leave>::default();
        let (of_thread, of_questions) = (gate.clone(), leave.clone());
        std::thread::spawn(move || {
            let [here, there] = listeners.map(|listener| listener.accept().expect("a tasker").0);
            let (asks, answers) = (
                there.try_clone().expect("a copy"),
                here.try_clone().expect("a copy"),
            );
            std::thread::spawn(move || of_questions.pass_questions(asks, here));
            pass(answers, there, &of_thread);
        });
        Way {
            source,
            target,
            gate,
            leave,
        }
    }

    /// Opens the stream at a limited rate, so that some memory is always under way.
    fn open_slowly(&self) {
        let gate = self.gate.clone();
        std::thread::spawn(move || {
            while Arc::strong_count(&gate) > 1 {
                *gate.0.lock().expect("no panic") += SLOW_LINE_BYTES;
                gate.1.notify_all();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }

    fn open(&self) {
        *self.gate.0.lock().expect("no panic") = usize::MAX;
        self.gate.1.notify_all();
    }

    /// Opens the stream for all but the final message, and waits until the target sends that.
    fn open_until_all_is_there(&self) {
        self.leave.stays.store(true, Ordering::SeqCst);
        self.open();
        wait_until("it has everything", || {
            self.leave.is_said.load(Ordering::SeqCst)
        });
    }

    /// Forwards the final message as well.
    fn lets_leave(&self) {
        self.leave.stays.store(false, Ordering::SeqCst);
    }

    /// Blocks the stream as at the start.
    fn shut(&self) {
        *self.gate.0.lock().expect("no panic") = FIRST_BYTES;
    }
}

/// Bytes per millisecond of the slow line.
const SLOW_LINE_BYTES: usize = 64 << 10;

fn pass(mut from: UnixStream, mut to: UnixStream, (left, opened): &(Mutex<usize>, Condvar)) {
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

/// A task that was dumped at the source and restored at the target without its memory; both copies
/// are stopped.
struct Scene {
    dir: tempfile::TempDir,
    here: Tasker,
    there: Tasker,
    way: Way,
    copy: i32,
}

impl Scene {
    fn new() -> Scene {
        Scene::of("pages")
    }

    /// Makes the scene with a task that runs this program.
    fn of(name: &str) -> Scene {
        let scene = Scene::begin(name).go_on();
        std::fs::write(scene.dir.path().join(SIGN), "").expect("a file");
        scene
    }

    /// Starts a task with this program; it is still running at the source.
    fn begin(name: &str) -> Scene {
        let dir = tempfile::tempdir().expect("dir");
        let (mut here, mut there) = (Tasker::start_with(&ALWAYS), Tasker::start_with(&ALWAYS));
        let way = Way::new(dir.path());
        let sign = dir.path().join(SIGN);
        here.run(
            tid(1),
            &program(dir.path(), name),
            &[MEGABYTES, sign.to_str().expect("text")],
        );
        here.output_until(tid(1), &mut Vec::new(), |text| text.ends_with(b"\n"));
        here.send(ToTasker::Inspect {
            migration: migration(1),
            tid: tid(1),
        });
        let inspected = here.until(&mut Vec::new(), |m| match m {
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
        let prepared = there.until(&mut Vec::new(), |m| match m {
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
            way,
            copy: 0,
        }
    }

    /// Pre-copies its memory and returns the number of bytes.
    fn pre_copy(&mut self) -> u64 {
        let (source, target) = (self.way.source.clone(), self.way.target.clone());
        self.there.send(ToTasker::ReceivePreCopy {
            migration: migration(1),
            memory_socket: target,
        });
        self.here.send(ToTasker::PreCopy {
            migration: migration(1),
            tid: tid(1),
            memory_socket: source,
        });
        self.way.open();
        let went = self.here.until(&mut Vec::new(), |m| match m {
            FromTasker::PreCopied { result, .. } => Some(result.clone()),
            _ => None,
        });
        self.way.shut();
        went.expect("it is there")
    }

    /// Dumps the task and restores it at the target.
    fn go_on(self) -> Scene {
        let Scene {
            dir,
            mut here,
            mut there,
            way,
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
        let report = moving::dumped(&mut here, &mut Vec::new()).expect("a dump");
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
        let restored = there.until(&mut Vec::new(), |m| match m {
            FromTasker::Restored { result, .. } => Some(result.clone()),
            _ => None,
        });
        let copy = restored.expect("a restore");
        Scene {
            dir,
            here,
            there,
            way,
            copy,
        }
    }

    /// Kills the source and runs the copy; most of its memory is missing.
    fn commit(&mut self) {
        let used = moving::kill_moved(&mut self.here, tid(1), migration(1), &mut Vec::new());
        assert_ne!(used, Usage::default());
        assert!(is_alive(self.copy));
        moving::run(&mut self.there, migration(1), used, &mut Vec::new());
    }

    fn arrival(&mut self) -> (Result<(), Failure>, Vec<FromTasker>) {
        let mut seen = Vec::new();
        let result = self.there.until(&mut seen, |m| match m {
            FromTasker::MemoryArrived { result, .. } => Some(result.clone()),
            _ => None,
        });
        (result, seen)
    }

    /// Asserts that the copy was killed and never read a wrong word.
    fn dies(mut self, seen: Vec<FromTasker>) {
        let mut output = moving::output_of(&seen, tid(1));
        let exited = |m: &FromTasker| match m {
            FromTasker::Exited { status, .. } => Some(*status),
            _ => None,
        };
        let mut rest = Vec::new();
        let status = seen
            .iter()
            .find_map(exited)
            .unwrap_or_else(|| self.there.until(&mut rest, exited));
        output.extend(moving::output_of(&rest, tid(1)));
        assert_eq!(status, 9, "{}", String::from_utf8_lossy(&output));
        assert!(!String::from_utf8_lossy(&output).contains("bad"));
        self.end();
    }

    /// Sends a signal to the process that fetches its memory.
    fn to_fetching(&self, signal: Signal) {
        let fetching = processes_with(&format!("lazy-pages -D {}", self.dir.path().display()));
        let [fetching] = fetching[..] else {
            panic!("one process fetches it: {fetching:?}")
        };
        kill(Pid::from_raw(fetching), signal).expect("it is there");
    }

    /// Waits for all memory, and asserts that the copy never read a wrong word.
    fn arrives_and_goes_on(mut self) {
        let arrived = self.arrival();
        self.goes_on(arrived);
    }

    /// Asserts that all memory has arrived and the task continues.
    fn goes_on(mut self, (result, seen): (Result<(), Failure>, Vec<FromTasker>)) {
        assert_eq!(result, Ok(()));
        let mut output = moving::output_of(&seen, tid(1));
        let more = moving::lines(&output) + 100;
        self.there
            .output_until(tid(1), &mut output, |text| moving::lines(text) > more);
        assert!(!String::from_utf8_lossy(&output).contains("bad"));
        self.there.send(ToTasker::Kill { tid: tid(1) });
        let (_, status, _) = self.there.follow_to_the_end(tid(1));
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

/// A task runs at the target before its memory arrives, and its copy at the source is dead by then.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn post_copy_task_runs_before_its_memory_arrives() {
    moving::require_moves();
    let mut scene = Scene::new();
    scene.commit();
    scene.way.open();
    scene.arrives_and_goes_on();
}

/// After a pre-copy a task needs little more memory from the source: the stream passes a sixth of
/// it at most. The task does not fork, because missing pages of children are requested again.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn pre_copied_task_needs_few_pages_more() {
    moving::require_moves();
    let mut scene = Scene::begin("pages");
    let went = scene.pre_copy();
    assert!(went >= 48 << 20, "{went} bytes went ahead");
    let mut scene = scene.go_on();
    scene.commit();
    scene.arrives_and_goes_on();
}

/// A cancelled migration ends the pre-copy, and the task continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn cancelled_migration_ends_the_pre_copy() {
    moving::require_moves();
    let mut scene = Scene::begin("pages");
    let (source, target) = (scene.way.source.clone(), scene.way.target.clone());
    scene.there.send(ToTasker::ReceivePreCopy {
        migration: migration(1),
        memory_socket: target,
    });
    // The stream blocks after the first bytes.
    scene.here.send(ToTasker::PreCopy {
        migration: migration(1),
        tid: tid(1),
        memory_socket: source,
    });
    wait_until("some of it is there", || {
        *scene.way.gate.0.lock().expect("no panic") == 0
    });
    scene.here.send(ToTasker::StopPreCopy {
        migration: migration(1),
    });
    discard(&mut scene.there, migration(1), &mut Vec::new());
    scene.way.open();
    let mut output = Vec::new();
    scene
        .here
        .output_until(tid(1), &mut output, |text| moving::lines(text) > 100);
    assert!(!String::from_utf8_lossy(&output).contains("bad"));
    scene.end();
}

/// A target that loses the pre-copied memory reports that and restores nothing.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn lost_pre_copy_fails_the_restore() {
    moving::require_moves();
    let mut scene = Scene::begin("pages");
    scene.pre_copy();
    scene.there.send(ToTasker::MemoryLost {
        migration: migration(1),
        why: "the line is cut".into(),
    });
    let images = scene.dir.path().join("none");
    let memory_way = Some(scene.way.target.clone());
    scene.there.send(ToTasker::Restore {
        migration: migration(1),
        tid: tid(1),
        dir: images,
        memory_write: None,
        memory_socket: memory_way,
    });
    let mut said = Vec::new();
    let restored = scene.there.until(&mut said, |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(matches!(restored, Err(Failure::Images(why)) if why.contains("pre-copied")));
    let lost = |m: &FromTasker| matches!(m, FromTasker::PreCopyLost { why: Failure::Images(why), .. } if why.contains("is cut"));
    assert!(said.iter().any(lost), "{said:?}");
    scene.end();
}

/// Memory that a task unmaps during post-copy stays unmapped, and all other memory arrives.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unmapped_pages_do_not_return_in_post_copy() {
    moving::require_moves();
    let mut scene = Scene::of("giver");
    scene.commit();
    let mut output = Vec::new();
    scene.way.open_slowly();
    let (result, seen) = scene.arrival();
    assert_eq!(result, Ok(()));
    output.extend(moving::output_of(&seen, tid(1)));
    let done = |text: &[u8]| {
        ["right\n", "bad"]
            .iter()
            .any(|word| String::from_utf8_lossy(text).contains(word))
    };
    scene.there.output_until(tid(1), &mut output, done);
    assert_eq!(
        output,
        b"gives\ngave\nright\n",
        "{}",
        String::from_utf8_lossy(&output)
    );
    scene.there.send(ToTasker::Kill { tid: tid(1) });
    let (_, status, _) = scene.there.follow_to_the_end(tid(1));
    assert_eq!(status, 9);
    scene.end();
}

/// A process whose memory is complete may fork while that of others still follows.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_process_may_fork_in_post_copy() {
    moving::require_moves();
    let mut scene = Scene::of("family");
    scene.commit();
    scene.way.open_slowly();
    scene.arrives_and_goes_on();
}

/// A task whose memory does not arrive ends, and never reads zeros in its place.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn missing_memory_ends_the_task_without_zeros() {
    moving::require_moves();
    let mut scene = Scene::new();
    scene.commit();
    scene.there.send(ToTasker::MemoryLost {
        migration: migration(1),
        why: "the line is cut".into(),
    });
    let (result, seen) = scene.arrival();
    assert_eq!(result, Err(Failure::Images("the line is cut".into())));
    scene.way.open();
    scene.dies(seen);
}

/// A task that has all its memory continues if the stream ends before the last message.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_task_survives_a_closed_memory_stream() {
    moving::require_moves();
    let mut scene = Scene::new();
    scene.commit();
    scene.way.open_until_all_is_there();
    scene.there.send(ToTasker::MemoryLost {
        migration: migration(1),
        why: "the line is cut".into(),
    });
    let arrived = scene.arrival();
    scene.way.lets_leave();
    scene.goes_on(arrived);
}

/// The memory stream is closed when all memory has arrived, even if CRIU does not end. The fetcher
/// is stopped after its final message; only its exit is missing.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_memory_closes_the_stream() {
    moving::require_moves();
    let mut scene = Scene::new();
    scene.commit();
    scene.way.open_until_all_is_there();
    scene.to_fetching(Signal::SIGSTOP);
    scene.way.lets_leave();
    wait_until("it is closed", || {
        scene.way.leave.is_closed.load(Ordering::SeqCst)
    });
    scene.to_fetching(Signal::SIGCONT);
    scene.arrives_and_goes_on();
}

/// A task that has all its memory continues if its fetcher is killed.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn complete_task_survives_a_killed_fetcher() {
    moving::require_moves();
    let mut scene = Scene::new();
    scene.commit();
    scene.way.open_until_all_is_there();
    scene.to_fetching(Signal::SIGKILL);
    let arrived = scene.arrival();
    scene.way.lets_leave();
    scene.goes_on(arrived);
}

/// A task whose fetcher is killed ends, and never reads zeros in place of its memory.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn killed_fetcher_ends_the_task_without_zeros() {
    moving::require_moves();
    let mut scene = Scene::new();
    scene.commit();
    scene.to_fetching(Signal::SIGKILL);
    let (result, seen) = scene.arrival();
    assert_eq!(result, Err(Failure::Killed { signal: 9 }));
    scene.way.open();
    scene.dies(seen);
}

/// A migration that is cancelled before the commit leaves the task at the source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn cancelled_post_copy_leaves_task_at_source() {
    moving::require_moves();
    let mut scene = Scene::new();
    discard(&mut scene.there, migration(1), &mut Vec::new());
    assert!(!is_alive(scene.copy));
    let mut seen = Vec::new();
    moving::continue_task(&mut scene.here, tid(1), migration(1), &mut seen);
    let mut output = moving::output_of(&seen, tid(1));
    let more = moving::lines(&output) + 100;
    scene
        .here
        .output_until(tid(1), &mut output, |text| moving::lines(text) > more);
    assert!(!String::from_utf8_lossy(&output).contains("bad"));
    scene.way.open();
    scene.end();
}
