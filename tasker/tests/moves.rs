//! Tests migrations between two taskers on this machine, which simulate two hosts.

mod common;

use common::moving::*;
use common::{Tasker, is_alive, migration, processes_with, sh, start_order, tid, wait_until};
use sempa_proto::Micros;
use sempa_proto::migration::{Failure, FileRequirement, Refusal, TaskFacts, Usage};
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A counter with threads and pipes migrates to the target and back, and loses no line.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn counter_migrates_there_and_back_without_loss() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let counter = compile_program(dir.path(), "counter");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    here.run(tid(1), &counter, &[]);
    let mut output = Vec::new();
    here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    for round in 0..3 {
        migrate_task(&mut here, &mut there, tid(1), round * 2 + 1, &mut output);
        let more = count_lines(&output) + 200;
        there.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
        migrate_task(&mut there, &mut here, tid(1), round * 2 + 2, &mut output);
        let more = count_lines(&output) + 200;
        here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
    }
    here.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    let (rest, status, used) = here.wait_for_exit(tid(1));
    output.extend(rest);
    assert_eq!(status, libc::SIGTERM);
    assert!(used.user + used.system > Micros(0), "{used:?}");
    assert_no_line_lost(&output);
    here.stop();
    there.stop();
    assert_eq!(processes_with(counter.to_str().expect("text")), []);
}

/// Two hundred mebibytes of memory migrate intact.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn two_hundred_mebibytes_migrate_intact() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let counter = compile_program(dir.path(), "counter");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    here.run(tid(1), &counter, &["200"]);
    let mut output = Vec::new();
    here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 10);
    migrate_task(&mut here, &mut there, tid(1), 1, &mut output);
    let more = count_lines(&output) + 200;
    there.wait_for_output(tid(1), &mut output, |text| count_lines(text) > more);
    assert_no_line_lost(&output);
    there.send(ToTasker::Kill { tid: tid(1) });
    let (_, status, used) = there.wait_for_exit(tid(1));
    assert_eq!(status, libc::SIGKILL);
    assert!(
        used.resident_max_bytes > 200 << 20,
        "what it used before counts: {used:?}"
    );
    here.stop();
    there.stop();
}

/// Children of a task migrate with the task, and the target reports its exit.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn children_migrate_and_exit_is_reported_there() {
    require_migration();
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let script = "sleep 57721 & echo ready; while kill -0 $! 2>/dev/null; do wait $!; done; echo child gone; exit 9";
    here.run(tid(1), &sh(), &["-c", script]);
    let mut output = Vec::new();
    here.wait_for_output(tid(1), &mut output, |text| text == b"ready\n");
    migrate_task(&mut here, &mut there, tid(1), 1, &mut output);
    let children = processes_with("sleep 57721");
    let sleeper = children
        .iter()
        .copied()
        .find(|p| std::fs::read_link(format!("/proc/{p}/exe")).is_ok_and(|e| e.ends_with("sleep")));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(sleeper.expect("it moved")),
        nix::sys::signal::SIGTERM,
    )
    .expect("kill");
    let (rest, status, _) = there.wait_for_exit(tid(1));
    // Some shells report how the child ended.
    assert_eq!(
        (rest.ends_with(b"child gone\n"), status),
        (true, 9 << 8),
        "{}",
        String::from_utf8_lossy(&rest)
    );
    here.stop();
    there.stop();
    assert_eq!(processes_with("sleep 57721"), []);
}

/// Python code of a child that has a copy of a library socket. The library closes that copy after
/// fork(2), when the child continues.
const FORKED: &str = "
import fcntl, os, signal, socket
listener = socket.create_server(('127.0.0.1', 0))
ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
listener.close()
for end in ends: fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_APPEND)
def close(*_):
    for end in ends: end.close()
signal.signal(signal.SIGCONT, close)
child = os.fork()
if child == 0:
    while True: signal.pause()
close()
print('ready', flush=True)
os.waitpid(child, 0)
";

/// A child that is stopped before its return from fork completes the fork before the dump.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn child_stopped_in_fork_returns_before_the_dump() {
    require_migration();
    let python = ["/usr/bin/python3", "/bin/python3"]
        .into_iter()
        .map(PathBuf::from)
        .find(|path| path.is_file());
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    here.run(tid(1), &python.expect("python3"), &["-c", FORKED]);
    let mut output = Vec::new();
    here.wait_for_output(tid(1), &mut output, |text| text == b"ready\n");
    migrate_task(&mut here, &mut there, tid(1), 1, &mut output);
    there.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    assert_eq!(there.wait_for_exit(tid(1)).1, libc::SIGTERM);
    here.stop();
    there.stop();
}

/// A killed restore leaves no process at the target, and the source continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn killed_restore_leaves_task_at_source() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let engine = write_waiting_wrapper(dir.path());
    let mut here = Tasker::start();
    let mut there = Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let (images, mut output) = dumped_counter(&mut here, dir.path());
    assert_eq!(
        prepare(&mut there, tid(1), migration(1), TaskFacts::default()),
        []
    );
    make_wrapper_wait(dir.path());
    there.send(ToTasker::Restore {
        migration: migration(1),
        tid: tid(1),
        dir: images.clone(),
        memory_write: None,
        memory_socket: None,
    });
    let engine = wait_for_pid_file(&dir.path().join("pid"));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(engine),
        nix::sys::signal::SIGKILL,
    )
    .expect("kill");
    let result = there.wait_for(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Err(Failure::Killed { signal: 9 }));
    make_wrapper_run(dir.path());
    assert_eq!(counter_pids(dir.path()).len(), 1, "only the source is left");
    assert_counter_continues(&mut here, &mut output);
    here.stop();
    there.stop();
}

/// A restored task can be discarded, and the task continues at the source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn discarded_copy_leaves_task_at_source() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let (images, mut output) = dumped_counter(&mut here, dir.path());
    let copy = restore(&mut there, tid(1), migration(1), &images).expect("a restore");
    assert!(is_alive(copy));
    let mut seen = Vec::new();
    discard(&mut there, migration(1), &mut seen);
    assert!(!is_alive(copy) && output_of(&seen, tid(1)).is_empty());
    assert_counter_continues(&mut here, &mut output);
    here.stop();
    there.stop();
}

/// A restored task does not depend on CRIU. Its death before the order to run is reported.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn restored_copy_needs_no_engine() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let d = dir.path().display().to_string();
    let engine = write_engine_wrapper(
        dir.path(),
        &format!("echo $$ > {d}/pid.new; mv {d}/pid.new {d}/pid"),
    );
    let mut here = Tasker::start();
    let mut there = Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let (images, mut output) = dumped_counter(&mut here, dir.path());
    assert_eq!(
        prepare(&mut there, tid(1), migration(1), TaskFacts::default()),
        []
    );
    let copy = restore(&mut there, tid(1), migration(1), &images).expect("a restore");
    let engine = wait_for_pid_file(&dir.path().join("pid"));
    assert!(
        !is_alive(engine),
        "an engine that is killed from now on could take the only copy along"
    );
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(copy), nix::sys::signal::SIGKILL)
        .expect("kill");
    let result = there.wait_for(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(matches!(result, Err(Failure::Engine(_))), "{result:?}");
    assert!(!is_alive(copy));
    there.send(ToTasker::Run {
        migration: migration(1),
        used: Usage::default(),
        paused: false,
    });
    let ran = there.wait_for(&mut Vec::new(), |m| match m {
        FromTasker::Running { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(ran.is_err());
    assert_counter_continues(&mut here, &mut output);
    here.stop();
    there.stop();
}

/// Damaged images make the restore fail before its deadline and leave no process.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn damaged_images_fail_and_leave_no_process() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let (images, mut output) = dumped_counter(&mut here, dir.path());
    let pages = images.join("pages-1.img");
    let length = std::fs::metadata(&pages).expect("pages").len();
    std::fs::File::options()
        .write(true)
        .open(&pages)
        .expect("open")
        .set_len(length - 4096)
        .expect("cut");
    let cut = restore(&mut there, tid(1), migration(1), &images);
    assert!(
        matches!(&cut, Err(Failure::Images(why)) if why.contains("pages-1.img")),
        "{cut:?}"
    );
    // The file has its full length again. Only CRIU can detect that another file is destroyed.
    std::fs::File::options()
        .write(true)
        .open(&pages)
        .expect("open")
        .set_len(length)
        .expect("grow");
    let core = images.join("core-2.img");
    let bytes = std::fs::metadata(&core).expect("core").len() as usize;
    std::fs::write(&core, vec![0u8; bytes]).expect("write");
    let begin = Instant::now();
    let bad = restore(&mut there, tid(1), migration(2), &images);
    assert!(
        matches!(&bad, Err(Failure::Engine(why)) if why.starts_with("Error")),
        "{bad:?}"
    );
    assert!(begin.elapsed() < Duration::from_secs(30));
    assert_eq!(counter_pids(dir.path()).len(), 1, "only the source is left");
    assert_counter_continues(&mut here, &mut output);
    here.stop();
    there.stop();
}

/// Images of another user's processes are not restored.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn images_of_another_user_are_refused() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let (images, mut output) = dumped_counter(&mut here, dir.path());
    // Real, effective and saved user and group ids of root, as CRIU encodes them.
    let root = [8, 0, 16, 0, 24, 0, 32, 0, 40, 0, 48, 0];
    let mut changed = 0;
    for path in std::fs::read_dir(&images)
        .expect("there")
        .flatten()
        .map(|entry| entry.path())
    {
        let mut bytes = std::fs::read(&path).expect("readable");
        let is_core = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("core-"));
        if let Some(at) = bytes
            .windows(root.len())
            .position(|part| part == root)
            .filter(|_| is_core)
        {
            for user in [1, 5, 9] {
                bytes[at + user] = 7;
            }
            std::fs::write(&path, bytes).expect("writable");
            changed += 1;
        }
    }
    assert!(changed > 0, "the images say whose they are");
    let other = Failure::Refused(vec![Refusal::OtherUser {
        found: 7,
        expected: 0,
    }]);
    assert_eq!(
        restore(&mut there, tid(1), migration(1), &images),
        Err(other)
    );
    assert_eq!(counter_pids(dir.path()).len(), 1, "there is no copy");
    assert_counter_continues(&mut here, &mut output);
    here.stop();
    there.stop();
}

/// CRIU that hangs is killed at its deadline.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn hanging_engine_is_killed_at_its_deadline() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let engine = write_waiting_wrapper(dir.path());
    let mut here = Tasker::start();
    let mut there = Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let (images, mut output) = dumped_counter(&mut here, dir.path());
    assert_eq!(
        prepare(&mut there, tid(1), migration(1), TaskFacts::default()),
        []
    );
    make_wrapper_wait(dir.path());
    let result = restore(&mut there, tid(1), migration(1), &images);
    assert!(
        matches!(result, Err(Failure::Deadline { .. })),
        "{result:?}"
    );
    assert!(!is_alive(wait_for_pid_file(&dir.path().join("pid"))));
    make_wrapper_run(dir.path());
    assert_counter_continues(&mut here, &mut output);
    here.stop();
    there.stop();
}

/// If the tasker is killed during a migration, no process of the task remains.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn tasker_killed_in_migration_leaves_no_process() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let (images, _) = dumped_counter(&mut here, dir.path());
    let copy = restore(&mut there, tid(1), migration(1), &images).expect("a restore");
    there.child.kill().expect("kill");
    wait_until("the held copy is gone", || !is_alive(copy));
    here.child.kill().expect("kill");
    wait_until("the stopped source is gone", || {
        counter_pids(dir.path()).is_empty()
    });
    wait_until("the engine is gone", || {
        processes_with(&format!("criu swrk {}", there.child.id())).is_empty()
    });
}

/// A task that dies while it is stopped makes the migration fail, and its exit is reported.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn exit_of_stopped_task_fails_the_migration() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut here = Tasker::start();
    start_stopped_counter(&mut here, dir.path(), &mut Vec::new());
    // A signal is kept until the task continues; the daemon's order to kill takes effect
    // immediately.
    here.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGCONT,
    });
    here.send(ToTasker::Kill { tid: tid(1) });
    assert_eq!(here.wait_for_exit(tid(1)).1, libc::SIGKILL);
    let result = dump(
        &mut here,
        tid(1),
        migration(1),
        &dir.path().join("images"),
        &mut Vec::new(),
    );
    assert_eq!(result, Err(Failure::TaskEnded));
    continue_task(&mut here, tid(1), migration(1), &mut Vec::new());
    here.stop();
}

/// Signals for a stopped task are kept until it continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn signals_wait_while_a_task_is_stopped() {
    require_migration();
    let mut here = Tasker::start();
    here.run(
        tid(1),
        &sh(),
        &[
            "-c",
            "trap 'echo got it; exit 4' TERM; echo ready; while :; do sleep 0.01; done",
        ],
    );
    here.wait_for_output(tid(1), &mut Vec::new(), |text| text == b"ready\n");
    stop(&mut here, tid(1), migration(1), &mut Vec::new());
    here.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    continue_task(&mut here, tid(1), migration(1), &mut Vec::new());
    let (output, status, _) = here.wait_for_exit(tid(1));
    assert_eq!(
        (String::from_utf8_lossy(&output).as_ref(), status),
        ("got it\n", 4 << 8)
    );
    here.stop();
}

/// A task with a resource that does not survive a migration is refused, and the refusal names the
/// resource.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unsupported_resources_are_refused_by_name() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut here = Tasker::start();
    let holder = compile_program(dir.path(), "holder");
    let cases = [
        ("sysv", "System V shared memory"),
        ("tcp", "a TCP connection to 127.0.0.1:"),
        ("orphan", "a background process"),
        ("lock", "a lock on the file"),
        ("pty", "the controlling end of a pseudo terminal"),
        ("mqueue", "the POSIX message queue"),
        ("cwd", "a working directory that was removed"),
    ];
    for (number, (what, expected)) in cases.into_iter().enumerate() {
        let tid = tid(number as u32 + 1);
        let scratch = dir.path().join(what);
        here.run(tid, &holder, &[what, scratch.to_str().expect("text")]);
        let mut said = Vec::new();
        here.wait_for_output(tid, &mut said, |text| text.ends_with(b"\n"));
        let result = inspect(&mut here, tid, migration(1));
        match (said.as_slice(), what) {
            (b"unable\n", _) => eprintln!("{what}: not possible on this machine"),
            // The task has both ends of the terminal, so it can migrate.
            (_, "pty") => assert!(result.is_ok(), "{result:?}"),
            _ => assert!(
                matches!(&result, Err(Refusal::UnsupportedResource { what }) if what.contains(expected)),
                "{what}: {result:?}"
            ),
        }
        here.send(ToTasker::Kill { tid });
        here.wait_for_exit(tid);
    }
    here.stop();
}

/// A target that lacks a requirement of the task refuses before the task is stopped.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unfit_target_refuses_before_the_stop() {
    require_migration();
    let mut there = Tasker::start();
    let mut facts = TaskFacts::default();
    facts.kernel_features.push("no_such_call".into());
    facts.cpu_features.push("no_such_feature".into());
    facts.resident_bytes = 1 << 60;
    facts.files.push(sempa_proto::migration::RequiredFile {
        path: "/no/such/program".into(),
        bytes: 1,
        requirement: FileRequirement::Content("00".into()),
    });
    let verdict = prepare(&mut there, tid(1), migration(1), facts);
    assert_eq!(verdict.len(), 4, "{verdict:?}");
    assert_eq!(
        prepare(&mut there, tid(1), migration(2), TaskFacts::default()),
        []
    );
    discard(&mut there, migration(2), &mut Vec::new());
    there.stop();
}

/// Of several concurrent migrations the target accepts those for which its memory suffices.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn concurrent_migrations_share_free_memory() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    let mut output = Vec::new();
    let counter = compile_program(dir.path(), "counter");
    here.run(tid(1), &counter, &[]);
    here.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 50);
    let facts = inspect(&mut here, tid(1), migration(1)).expect("it can move");
    let free = match &prepare(
        &mut there,
        tid(9),
        migration(9),
        TaskFacts {
            resident_bytes: 1 << 60,
            ..facts.clone()
        },
    )[..]
    {
        [Refusal::Memory { have, .. }] => *have,
        other => panic!("nobody has so much: {other:?}"),
    };
    // The free memory suffices for one such task, but not for two.
    let resident_bytes = free / 4 * 3;
    let large = TaskFacts {
        resident_bytes,
        ..facts.clone()
    };
    let promised = |verdict: &[Refusal]| matches!(verdict, [Refusal::MemoryReserved { reserved: promised, .. }] if *promised == resident_bytes);
    for number in 1..=3 {
        there.send(ToTasker::Prepare {
            migration: migration(number),
            tid: tid(number as u32),
            facts: large.clone(),
        });
    }
    let mut verdicts = std::collections::BTreeMap::new();
    while verdicts.len() < 3 {
        let (number, verdict) = there.wait_for(&mut Vec::new(), |m| match m {
            FromTasker::Prepared {
                migration, verdict, ..
            } => Some((migration.0, verdict.clone())),
            _ => None,
        });
        verdicts.insert(number, verdict);
    }
    assert_eq!(verdicts[&1], []);
    assert!(promised(&verdicts[&2]), "{verdicts:?}");
    assert!(
        matches!(&verdicts[&3][..], [Refusal::MemoryReserved { .. }]),
        "{verdicts:?}"
    );
    assert_eq!(
        prepare(&mut there, tid(4), migration(4), facts),
        [],
        "a small one has room beside it"
    );
    discard(&mut there, migration(4), &mut Vec::new());
    // Memory of discarded tasks is no longer reserved, nor is memory that has arrived.
    discard(&mut there, migration(1), &mut Vec::new());
    assert_eq!(prepare(&mut there, tid(1), migration(5), large.clone()), []);
    assert!(promised(&prepare(
        &mut there,
        tid(2),
        migration(6),
        large.clone()
    )));
    let mut seen = Vec::new();
    stop(&mut here, tid(1), migration(5), &mut seen);
    dump(
        &mut here,
        tid(1),
        migration(5),
        &dir.path().join("images"),
        &mut seen,
    )
    .expect("a dump");
    restore(&mut there, tid(1), migration(5), &dir.path().join("images")).expect("a restore");
    assert_eq!(prepare(&mut there, tid(2), migration(7), large), []);
    here.stop();
    there.stop();
}

/// A missing or broken CRIU is reported together with advice on how to install it.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn missing_engine_is_reported_with_a_remedy() {
    let dir = tempfile::tempdir().expect("dir");
    let mut tasker = Tasker::start_with_env(&[("SEMPA_CRIU", "/no/such/criu")]);
    let why = tasker
        .capabilities
        .engine
        .clone()
        .expect_err("there is none");
    assert!(
        why.contains("/no/such/criu") && why.contains("cargo xtask criu"),
        "{why}"
    );
    tasker.run(tid(1), &sh(), &["-c", "sleep 1000"]);
    let refused = inspect(&mut tasker, tid(1), migration(1));
    assert!(
        matches!(refused, Err(Refusal::NoEngine { .. })),
        "{refused:?}"
    );
    tasker.stop();

    // The engine has a version number but cannot dump.
    let broken = dir.path().join("criu");
    std::fs::write(
        &broken,
        "#!/bin/sh\n[ \"$1\" = --version ] && echo Version: 9.9\n",
    )
    .expect("write");
    std::fs::set_permissions(&broken, std::fs::Permissions::from_mode(0o755)).expect("mode");
    let mut tasker = Tasker::start_with_env(&[("SEMPA_CRIU", broken.to_str().expect("text"))]);
    tasker.run(tid(1), &sh(), &["-c", "sleep 1000"]);
    let refused = inspect(&mut tasker, tid(1), migration(1));
    assert!(
        matches!(refused, Err(Refusal::NoEngine { .. })),
        "{refused:?}"
    );
    tasker.stop();
}

/// Starts, stops and dumps a counter. Returns the image directory and the output until the dump.
fn dumped_counter(tasker: &mut Tasker, dir: &Path) -> (PathBuf, Vec<u8>) {
    let mut output = Vec::new();
    start_stopped_counter(tasker, dir, &mut output);
    let images = dir.join("images");
    dump(tasker, tid(1), migration(1), &images, &mut Vec::new()).expect("a dump");
    (images, output)
}

/// Returns the PIDs of the running processes of the counter that was compiled in this directory.
fn counter_pids(dir: &Path) -> Vec<i32> {
    processes_with(dir.join("counter").to_str().expect("text"))
}

/// Many tasks with the same working directory migrate at the same time.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn tasks_with_one_directory_migrate_at_once() {
    require_migration();
    const TASKS: u32 = 8;
    let dir = tempfile::tempdir().expect("dir");
    let counter = compile_program(dir.path(), "counter");
    let (mut here, mut there) = (Tasker::start(), Tasker::start());
    for n in 1..=TASKS {
        let mut start = start_order(tid(n), &counter, &[]);
        start.working_dir = dir.path().into();
        here.send(ToTasker::Start(start));
    }
    let mut seen = Vec::new();
    while (1..=TASKS).any(|n| output_of(&seen, tid(n)).is_empty()) {
        seen.push(here.wait_for_message());
    }
    let count = |seen: &[FromTasker], what: fn(&FromTasker) -> bool| {
        seen.iter().filter(|m| what(m)).count()
    };
    for n in 1..=TASKS {
        here.send(ToTasker::Stop {
            migration: migration(n.into()),
            tid: tid(n),
            memory_write: None,
        });
    }
    while count(&seen, |m| matches!(m, FromTasker::Stopped { .. })) < TASKS as usize {
        seen.push(here.wait_for_message());
    }
    for n in 1..=TASKS {
        let dir = dir.path().join(format!("images-{n}"));
        here.send(ToTasker::Dump {
            migration: migration(n.into()),
            tid: tid(n),
            dir,
            memory_socket: None,
        });
    }
    while count(&seen, |m| matches!(m, FromTasker::Dumped { .. })) < TASKS as usize {
        seen.push(here.wait_for_message());
    }
    for message in &seen {
        if let FromTasker::Dumped { migration, result } = message {
            assert!(result.is_ok(), "{migration}: {result:?}");
        }
    }
    for n in 1..=TASKS {
        let id = migration(n.into());
        there.send(ToTasker::Restore {
            migration: id,
            tid: tid(n),
            dir: dir.path().join(format!("images-{n}")),
            memory_write: None,
            memory_socket: None,
        });
    }
    let mut restored = Vec::new();
    while restored.len() < TASKS as usize {
        if let FromTasker::Restored { migration, result } = there.wait_for_message() {
            result.expect("a restore");
            restored.push(migration);
        }
    }
    let mut seen_there = Vec::new();
    for id in restored {
        let used = kill_migrated(&mut here, tid(id.0 as u32), id, &mut seen);
        run(&mut there, id, used, &mut seen_there);
    }
    let left = (1..=TASKS)
        .map(|n| output_of(&seen, tid(n)))
        .collect::<Vec<_>>();
    while (1..=TASKS).any(|n| count_lines(&output_of(&seen_there, tid(n))) < 20) {
        let message = there.wait_for_message();
        assert!(!matches!(message, FromTasker::Exited { .. }), "{message:?}");
        seen_there.push(message);
    }
    for (n, mut output) in (1..=TASKS).zip(left) {
        output.extend(output_of(&seen_there, tid(n)));
        assert_no_line_lost(&output);
    }
    here.stop();
    there.stop();
}

/// Waits for the tasker's next report about the engine. Returns the engine's version or the error.
fn wait_for_engine_report(tasker: &mut Tasker) -> Result<String, String> {
    tasker.wait_for(&mut Vec::new(), |m| match m {
        FromTasker::Ready(capabilities) => Some(capabilities.engine.clone()),
        _ => None,
    })
}

/// If CRIU was missing or its probe failed, the probe is repeated, and CRIU is used when the probe
/// succeeds.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn failed_engine_is_tried_again() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (broken, late) = (dir.path().join("broken"), dir.path().join("late"));
    std::fs::write(&broken, "").expect("write");
    let engine = write_engine_wrapper(
        dir.path(),
        &format!("[ -e {} ] && exit 7", broken.display()),
    );
    let start =
        |engine: &Path| Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let (mut fails, lacks) = (start(&engine), start(&late));
    assert!(
        lacks
            .capabilities
            .engine
            .as_ref()
            .is_err_and(|why| why.contains("there is no dump engine")),
        "{:?}",
        lacks.capabilities
    );
    let why = wait_for_engine_report(&mut fails).expect_err("it fails");
    assert!(why.contains("failed its trial here"), "{why}");
    std::fs::remove_file(&broken).expect("remove");
    std::os::unix::fs::symlink(&engine, &late).expect("a name");
    for mut tasker in [fails, lacks] {
        wait_for_engine_report(&mut tasker).expect("it works now");
        tasker.run(tid(9), &sh(), &["-c", "sleep 1000"]);
        let facts = inspect(&mut tasker, tid(9), migration(9)).expect("it can be moved");
        assert_eq!(prepare(&mut tasker, tid(8), migration(8), facts), []);
        tasker.stop();
    }
}
