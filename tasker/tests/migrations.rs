//! Tests migrations between two taskers on this machine. Each tasker simulates the tasker of
//! another host.

mod common;

use common::migration_steps::*;
use common::{
    Tasker, is_alive, is_descendant, migration_id, processes_with_text, shell_path, start_order,
    tid, wait_until,
};
use sempa_proto::Micros;
use sempa_proto::migration::{Failure, FileRequirement, Refusal, TaskFacts, Usage};
use sempa_proto::tasker::{EngineUnavailable, FromTasker, ToTasker};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A counter with threads and pipes migrates to the target and back three times, and loses no line.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn counter_migrates_there_and_back_without_loss() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let counter = compile_program(dir.path(), "counter");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    source.start_task_and_wait(tid(1), &counter, &[]);
    let mut output = Vec::new();
    source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    for round in 0..3 {
        migrate_task(&mut source, &mut target, tid(1), round * 2 + 1, &mut output);
        let line_count = count_lines(&output) + 200;
        target.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
        migrate_task(&mut target, &mut source, tid(1), round * 2 + 2, &mut output);
        let line_count = count_lines(&output) + 200;
        source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    }
    source.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    let (last_output, status, usage) = source.wait_for_exit(tid(1));
    output.extend(last_output);
    assert_eq!(status, libc::SIGTERM);
    assert!(usage.user + usage.system > Micros(0), "{usage:?}");
    assert_no_line_lost(&output);
    source.stop_and_wait();
    target.stop_and_wait();
    assert_eq!(processes_with_text(counter.to_str().expect("text")), []);
}

/// A task with two hundred mebibytes of memory migrates and loses no line of output.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn two_hundred_mebibytes_migrate_intact() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let counter = compile_program(dir.path(), "counter");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    source.start_task_and_wait(tid(1), &counter, &["200"]);
    let mut output = Vec::new();
    source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 10);
    migrate_task(&mut source, &mut target, tid(1), 1, &mut output);
    let line_count = count_lines(&output) + 200;
    target.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    assert_no_line_lost(&output);
    target.send(ToTasker::Kill { tid: tid(1) });
    let (_, status, usage) = target.wait_for_exit(tid(1));
    assert_eq!(status, libc::SIGKILL);
    assert!(
        usage.resident_max_bytes > 200 << 20,
        "what it used before counts: {usage:?}"
    );
    source.stop_and_wait();
    target.stop_and_wait();
}

/// Children of a task migrate with it. After the migration the target reports the task's exit.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn children_migrate_and_exit_is_reported_there() {
    require_migration();
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    let script = "sleep 57721 & echo ready; while kill -0 $! 2>/dev/null; do wait $!; done; echo child gone; exit 9";
    source.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
    let mut output = Vec::new();
    source.wait_for_output(tid(1), &mut output, |text| text == b"ready\n");
    migrate_task(&mut source, &mut target, tid(1), 1, &mut output);
    // The kernel may not have removed the killed processes of the source yet.
    let target_pid = target.child.id() as i32;
    let find_sleeper = || {
        let children = processes_with_text("sleep 57721");
        children.into_iter().find(|pid| {
            let program = std::fs::read_link(format!("/proc/{pid}/exe"));
            program.is_ok_and(|path| path.ends_with("sleep")) && is_descendant(*pid, target_pid)
        })
    };
    wait_until("the child is at the target", || find_sleeper().is_some());
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(find_sleeper().expect("it sleeps on")),
        nix::sys::signal::SIGTERM,
    )
    .expect("kill");
    let (last_output, status, _) = target.wait_for_exit(tid(1));
    // Some shells report how the child ended.
    assert_eq!(
        (last_output.ends_with(b"child gone\n"), status),
        (true, 9 << 8),
        "{}",
        String::from_utf8_lossy(&last_output)
    );
    source.stop_and_wait();
    target.stop_and_wait();
    assert_eq!(processes_with_text("sleep 57721"), []);
}

/// Python code of a task whose child has a copy of a library socket. The library closes the copy
/// after fork(2), when the child continues.
const FORKING_PROGRAM: &str = "
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

/// A child that is stopped before it has returned from fork(2) completes the fork before the dump.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn stopped_fork_returns_before_the_dump() {
    require_migration();
    let python = ["/usr/bin/python3", "/bin/python3"]
        .into_iter()
        .map(PathBuf::from)
        .find(|path| path.is_file());
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    source.start_task_and_wait(tid(1), &python.expect("python3"), &["-c", FORKING_PROGRAM]);
    let mut output = Vec::new();
    source.wait_for_output(tid(1), &mut output, |text| text == b"ready\n");
    migrate_task(&mut source, &mut target, tid(1), 1, &mut output);
    target.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    assert_eq!(target.wait_for_exit(tid(1)).1, libc::SIGTERM);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// If a restore is killed, no process remains at the target, and the task continues at the source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn killed_restore_leaves_task_at_source() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let engine = write_waiting_wrapper(dir.path());
    let mut source = Tasker::start();
    let mut target = Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let (images, mut output) = dump_counter(&mut source, dir.path());
    assert_eq!(
        prepare_and_wait(&mut target, tid(1), migration_id(1), TaskFacts::default()),
        []
    );
    make_wrapper_wait(dir.path());
    target.send(ToTasker::Restore {
        migration: migration_id(1),
        tid: tid(1),
        image_dir: images.clone(),
        memory_write: None,
        memory_socket_path: None,
    });
    let engine = wait_for_pid_file(&dir.path().join("pid"));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(engine),
        nix::sys::signal::SIGKILL,
    )
    .expect("kill");
    let result = target.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert_eq!(result, Err(Failure::Killed { signal: 9 }));
    make_wrapper_proceed(dir.path());
    assert_eq!(
        counter_processes(dir.path()).len(),
        1,
        "only the source is left"
    );
    assert_counter_continues(&mut source, &mut output);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// After a restored task is discarded, the task continues at the source.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn discarded_copy_leaves_task_at_source() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    let (images, mut output) = dump_counter(&mut source, dir.path());
    let restored_pid =
        restore_and_wait(&mut target, tid(1), migration_id(1), &images).expect("a restore");
    assert!(is_alive(restored_pid));
    let mut messages = Vec::new();
    discard_and_wait(&mut target, migration_id(1), &mut messages);
    assert!(!is_alive(restored_pid) && output_of(&messages, tid(1)).is_empty());
    assert_counter_continues(&mut source, &mut output);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// A restored task does not need CRIU any more. If the task dies before the order to run, its death
/// is reported.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn restored_copy_needs_no_engine() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let engine = write_pid_wrapper(dir.path());
    let mut source = Tasker::start();
    let mut target = Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let (images, mut output) = dump_counter(&mut source, dir.path());
    assert_eq!(
        prepare_and_wait(&mut target, tid(1), migration_id(1), TaskFacts::default()),
        []
    );
    let restored_pid =
        restore_and_wait(&mut target, tid(1), migration_id(1), &images).expect("a restore");
    let engine = wait_for_pid_file(&dir.path().join("pid"));
    assert!(
        !is_alive(engine),
        "an engine that is killed from now on could take the only copy along"
    );
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(restored_pid),
        nix::sys::signal::SIGKILL,
    )
    .expect("kill");
    let result = target.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(matches!(result, Err(Failure::Engine(_))), "{result:?}");
    assert!(!is_alive(restored_pid));
    target.send(ToTasker::Run {
        migration: migration_id(1),
        earlier_usage: Usage::default(),
        stays_paused: false,
    });
    let run_result = target.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::Running { result, .. } => Some(result.clone()),
        _ => None,
    });
    assert!(run_result.is_err());
    assert_counter_continues(&mut source, &mut output);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// With damaged images the restore fails before its deadline, and no process remains.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn damaged_images_fail_and_leave_no_process() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    let (images, mut output) = dump_counter(&mut source, dir.path());
    let pages_image = images.join("pages-1.img");
    let pages_bytes = std::fs::metadata(&pages_image).expect("pages").len();
    std::fs::File::options()
        .write(true)
        .open(&pages_image)
        .expect("open")
        .set_len(pages_bytes - 4096)
        .expect("cut");
    let truncated_images_result = restore_and_wait(&mut target, tid(1), migration_id(1), &images);
    assert!(
        matches!(&truncated_images_result, Err(Failure::Images(why)) if why.contains("pages-1.img")),
        "{truncated_images_result:?}"
    );
    // The truncated image is extended to its previous length. The damage to the second image leaves
    // the length of that image unchanged, so only CRIU can detect the damage.
    std::fs::File::options()
        .write(true)
        .open(&pages_image)
        .expect("open")
        .set_len(pages_bytes)
        .expect("grow");
    let core_image = std::fs::read_dir(&images)
        .expect("there")
        .map(|entry| entry.expect("readable").path())
        .find(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy());
            name.is_some_and(|name| name.starts_with("core-"))
        })
        .expect("a core image");
    let bytes = std::fs::metadata(&core_image).expect("core").len() as usize;
    std::fs::write(&core_image, vec![0u8; bytes]).expect("write");
    let started_at = Instant::now();
    let damaged_images_result = restore_and_wait(&mut target, tid(1), migration_id(2), &images);
    assert!(
        matches!(&damaged_images_result, Err(Failure::Engine(why)) if why.starts_with("Error")),
        "{damaged_images_result:?}"
    );
    assert!(started_at.elapsed() < Duration::from_secs(30));
    assert_eq!(
        counter_processes(dir.path()).len(),
        1,
        "only the source is left"
    );
    assert_counter_continues(&mut source, &mut output);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// Images of a process with another user id are refused, even though their files belong to the
/// tasker's user.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn images_of_another_user_are_refused() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    let (images, mut output) = dump_counter(&mut source, dir.path());
    // Real, effective and saved user and group ids of root, as CRIU encodes them.
    let root_ids = [8, 0, 16, 0, 24, 0, 32, 0, 40, 0, 48, 0];
    let mut changed_file_count = 0;
    for path in std::fs::read_dir(&images)
        .expect("there")
        .flatten()
        .map(|entry| entry.path())
    {
        let mut bytes = std::fs::read(&path).expect("readable");
        let is_core = path
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("core-"));
        if let Some(root_ids_start) = bytes
            .windows(root_ids.len())
            .position(|part| part == root_ids)
            .filter(|_| is_core)
        {
            for id_offset in [1, 5, 9] {
                bytes[root_ids_start + id_offset] = 7;
            }
            std::fs::write(&path, bytes).expect("writable");
            changed_file_count += 1;
        }
    }
    assert!(changed_file_count > 0, "the images say whose they are");
    let refusal = Failure::Refused(vec![Refusal::OtherUser {
        found: 7,
        expected: 0,
    }]);
    assert_eq!(
        restore_and_wait(&mut target, tid(1), migration_id(1), &images),
        Err(refusal)
    );
    assert_eq!(counter_processes(dir.path()).len(), 1, "there is no copy");
    assert_counter_continues(&mut source, &mut output);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// An engine that hangs is killed at its deadline.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn hanging_engine_is_killed_at_its_deadline() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let engine = write_waiting_wrapper(dir.path());
    let mut source = Tasker::start();
    let mut target = Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let (images, mut output) = dump_counter(&mut source, dir.path());
    assert_eq!(
        prepare_and_wait(&mut target, tid(1), migration_id(1), TaskFacts::default()),
        []
    );
    make_wrapper_wait(dir.path());
    let result = restore_and_wait(&mut target, tid(1), migration_id(1), &images);
    assert!(
        matches!(result, Err(Failure::Deadline { .. })),
        "{result:?}"
    );
    assert!(!is_alive(wait_for_pid_file(&dir.path().join("pid"))));
    make_wrapper_proceed(dir.path());
    assert_counter_continues(&mut source, &mut output);
    source.stop_and_wait();
    target.stop_and_wait();
}

/// If the tasker is killed during a migration, no process of the task remains.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn tasker_killed_in_migration_leaves_no_process() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    let (images, _) = dump_counter(&mut source, dir.path());
    let restored_pid =
        restore_and_wait(&mut target, tid(1), migration_id(1), &images).expect("a restore");
    target.child.kill().expect("kill");
    wait_until("the held copy is gone", || !is_alive(restored_pid));
    source.child.kill().expect("kill");
    wait_until("the stopped source is gone", || {
        counter_processes(dir.path()).is_empty()
    });
    wait_until("the engine is gone", || {
        processes_with_text(&format!("criu swrk {}", target.child.id())).is_empty()
    });
}

/// A task that dies while it is stopped makes the migration fail, and its exit is reported.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn exit_of_stopped_task_fails_the_migration() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut source = Tasker::start();
    start_stopped_counter(&mut source, dir.path(), &mut Vec::new());
    // SIGCONT is stored until the task continues. The daemon's order to kill takes effect
    // immediately.
    source.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGCONT,
    });
    source.send(ToTasker::Kill { tid: tid(1) });
    assert_eq!(source.wait_for_exit(tid(1)).1, libc::SIGKILL);
    let result = dump_and_wait(
        &mut source,
        tid(1),
        migration_id(1),
        &dir.path().join("images"),
        &mut Vec::new(),
    );
    assert_eq!(result, Err(Failure::TaskEnded));
    continue_and_wait(&mut source, tid(1), migration_id(1), &mut Vec::new());
    source.stop_and_wait();
}

/// Signals for a stopped task are delivered when the task continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn signals_for_stopped_task_arrive_when_it_continues() {
    require_migration();
    let mut source = Tasker::start();
    source.start_task_and_wait(
        tid(1),
        &shell_path(),
        &[
            "-c",
            "trap 'echo got it; exit 4' TERM; echo ready; while :; do sleep 0.01; done",
        ],
    );
    source.wait_for_output(tid(1), &mut Vec::new(), |text| text == b"ready\n");
    stop_and_wait(&mut source, tid(1), migration_id(1), &mut Vec::new());
    source.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    continue_and_wait(&mut source, tid(1), migration_id(1), &mut Vec::new());
    let (output, status, _) = source.wait_for_exit(tid(1));
    assert_eq!(
        (String::from_utf8_lossy(&output).as_ref(), status),
        ("got it\n", 4 << 8)
    );
    source.stop_and_wait();
}

/// The refusal of a task names the resource that does not survive a migration.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unsupported_resources_are_refused_by_name() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let mut source = Tasker::start();
    let program = compile_program(dir.path(), "holder");
    let cases = [
        ("sysv", "System V shared memory"),
        ("tcp", "a TCP connection to 127.0.0.1:"),
        ("orphan", "a background process"),
        ("lock", "a lock on the file"),
        ("pty", "the master end of a pseudo terminal"),
        ("mqueue", "the POSIX message queue"),
        ("cwd", "a working directory that was removed"),
    ];
    for (index, (resource, expected)) in cases.into_iter().enumerate() {
        let tid = tid(index as u32 + 1);
        let scratch_path = dir.path().join(resource);
        source.start_task_and_wait(
            tid,
            &program,
            &[resource, scratch_path.to_str().expect("text")],
        );
        let mut messages = Vec::new();
        source.wait_for_output(tid, &mut messages, |text| text.ends_with(b"\n"));
        let result = inspect_and_wait(&mut source, tid, migration_id(1));
        match (messages.as_slice(), resource) {
            (b"unable\n", _) => eprintln!("{resource}: not possible on this machine"),
            // The task has both ends of the terminal, so it can migrate.
            (_, "pty") => assert!(result.is_ok(), "{result:?}"),
            _ => assert!(
                matches!(&result, Err(Refusal::UnsupportedResource { what: resource }) if resource.contains(expected)),
                "{resource}: {result:?}"
            ),
        }
        source.send(ToTasker::Kill { tid });
        source.wait_for_exit(tid);
    }
    source.stop_and_wait();
}

/// A target that lacks a file, a kernel feature, a processor feature or memory refuses the task
/// before it is stopped.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unsuitable_target_refuses_before_the_stop() {
    require_migration();
    let mut target = Tasker::start();
    let mut facts = TaskFacts::default();
    facts.kernel_features.push("no_such_call".into());
    facts.cpu_features.push("no_such_feature".into());
    facts.memory_bytes = 1 << 60;
    facts.files.push(sempa_proto::migration::RequiredFile {
        path: "/no/such/program".into(),
        bytes: 1,
        requirement: FileRequirement::Content("00".into()),
    });
    let verdict = prepare_and_wait(&mut target, tid(1), migration_id(1), facts);
    assert_eq!(verdict.len(), 4, "{verdict:?}");
    assert_eq!(
        prepare_and_wait(&mut target, tid(1), migration_id(2), TaskFacts::default()),
        []
    );
    discard_and_wait(&mut target, migration_id(2), &mut Vec::new());
    target.stop_and_wait();
}

/// Orders the preparation of three migrations at once, with the numbers 1 to 3. Returns the verdict
/// for each number.
fn prepare_three_tasks(target: &mut Tasker, facts: &TaskFacts) -> BTreeMap<u64, Vec<Refusal>> {
    for number in 1..=3 {
        target.send(ToTasker::Prepare {
            migration: migration_id(number),
            tid: tid(number as u32),
            facts: facts.clone(),
        });
    }
    let mut verdicts = BTreeMap::new();
    while verdicts.len() < 3 {
        let (number, verdict) = target.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::Prepared {
                migration, verdict, ..
            } => Some((migration.0, verdict.clone())),
            _ => None,
        });
        verdicts.insert(number, verdict);
    }
    verdicts
}

/// The target accepts only as many concurrent migrations as its free memory permits.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn concurrent_migrations_share_free_memory() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    let mut output = Vec::new();
    let counter = compile_program(dir.path(), "counter");
    source.start_task_and_wait(tid(1), &counter, &[]);
    source.wait_for_output(tid(1), &mut output, |text| count_lines(text) > 50);
    let facts = inspect_and_wait(&mut source, tid(1), migration_id(1)).expect("it can move");
    let free_bytes = match &prepare_and_wait(
        &mut target,
        tid(9),
        migration_id(9),
        TaskFacts {
            memory_bytes: 1 << 60,
            ..facts.clone()
        },
    )[..]
    {
        [Refusal::Memory { have, .. }] => *have,
        other => panic!("nobody has so much: {other:?}"),
    };
    // The free memory suffices for one task of this size, but not for two.
    let resident_bytes = free_bytes / 4 * 3;
    let large_task = TaskFacts {
        memory_bytes: resident_bytes,
        ..facts.clone()
    };
    let is_memory_refusal = |verdict: &[Refusal]| matches!(verdict, [Refusal::MemoryReserved { reserved_bytes, .. }] if *reserved_bytes == resident_bytes);
    let verdicts = prepare_three_tasks(&mut target, &large_task);
    assert_eq!(verdicts[&1], []);
    assert!(is_memory_refusal(&verdicts[&2]), "{verdicts:?}");
    assert!(
        matches!(&verdicts[&3][..], [Refusal::MemoryReserved { .. }]),
        "{verdicts:?}"
    );
    assert_eq!(
        prepare_and_wait(&mut target, tid(4), migration_id(4), facts),
        [],
        "a small one has room beside it"
    );
    discard_and_wait(&mut target, migration_id(4), &mut Vec::new());
    // The memory of a discarded task is no longer reserved. The same holds for memory that has
    // arrived.
    discard_and_wait(&mut target, migration_id(1), &mut Vec::new());
    assert_eq!(
        prepare_and_wait(&mut target, tid(1), migration_id(5), large_task.clone()),
        []
    );
    assert!(is_memory_refusal(&prepare_and_wait(
        &mut target,
        tid(2),
        migration_id(6),
        large_task.clone()
    )));
    let mut messages = Vec::new();
    stop_and_wait(&mut source, tid(1), migration_id(5), &mut messages);
    dump_and_wait(
        &mut source,
        tid(1),
        migration_id(5),
        &dir.path().join("images"),
        &mut messages,
    )
    .expect("a dump");
    restore_and_wait(
        &mut target,
        tid(1),
        migration_id(5),
        &dir.path().join("images"),
    )
    .expect("a restore");
    assert_eq!(
        prepare_and_wait(&mut target, tid(2), migration_id(7), large_task),
        []
    );
    source.stop_and_wait();
    target.stop_and_wait();
}

/// The report of a missing or broken CRIU contains advice on how to install it.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn missing_engine_is_reported_with_install_advice() {
    let dir = tempfile::tempdir().expect("dir");
    let mut tasker = Tasker::start_with_env(&[("SEMPA_CRIU", "/no/such/criu")]);
    let why = tasker
        .capabilities
        .engine_version
        .clone()
        .expect_err("there is none");
    assert!(
        why.0.contains("/no/such/criu") && why.0.contains("cargo xtask criu"),
        "{why}"
    );
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", "sleep 1000"]);
    let refusal = inspect_and_wait(&mut tasker, tid(1), migration_id(1));
    assert!(
        matches!(refusal, Err(Refusal::NoEngine { .. })),
        "{refusal:?}"
    );
    tasker.stop_and_wait();

    // The engine reports a version but cannot dump.
    let broken_engine = dir.path().join("criu");
    std::fs::write(
        &broken_engine,
        "#!/bin/sh\n[ \"$1\" = --version ] && echo Version: 9.9\n",
    )
    .expect("write");
    std::fs::set_permissions(&broken_engine, std::fs::Permissions::from_mode(0o755)).expect("mode");
    let mut tasker =
        Tasker::start_with_env(&[("SEMPA_CRIU", broken_engine.to_str().expect("text"))]);
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", "sleep 1000"]);
    let refusal = inspect_and_wait(&mut tasker, tid(1), migration_id(1));
    assert!(
        matches!(refusal, Err(Refusal::NoEngine { .. })),
        "{refusal:?}"
    );
    tasker.stop_and_wait();
}

/// Starts, stops and dumps a counter. Returns the image directory, and the output of the counter
/// until the dump.
fn dump_counter(tasker: &mut Tasker, dir: &Path) -> (PathBuf, Vec<u8>) {
    let mut output = Vec::new();
    start_stopped_counter(tasker, dir, &mut output);
    let images = dir.join("images");
    dump_and_wait(tasker, tid(1), migration_id(1), &images, &mut Vec::new()).expect("a dump");
    (images, output)
}

/// Returns the PIDs of the running counter processes whose program is in the directory `dir`.
fn counter_processes(dir: &Path) -> Vec<i32> {
    processes_with_text(dir.join("counter").to_str().expect("text"))
}

/// Eight tasks with the same working directory migrate at the same time.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn tasks_with_the_same_directory_migrate_concurrently() {
    require_migration();
    const TASK_COUNT: u32 = 8;
    let dir = tempfile::tempdir().expect("dir");
    let counter = compile_program(dir.path(), "counter");
    let (mut source, mut target) = (Tasker::start(), Tasker::start());
    for n in 1..=TASK_COUNT {
        let mut start = start_order(tid(n), &counter, &[]);
        start.working_dir = dir.path().into();
        source.send(ToTasker::Start(start));
    }
    let mut messages = Vec::new();
    while (1..=TASK_COUNT).any(|n| output_of(&messages, tid(n)).is_empty()) {
        messages.push(source.wait_for_message());
    }
    let count_messages = |messages: &[FromTasker], is_counted: fn(&FromTasker) -> bool| {
        messages.iter().filter(|m| is_counted(m)).count()
    };
    for n in 1..=TASK_COUNT {
        source.send(ToTasker::Stop {
            migration: migration_id(n.into()),
            tid: tid(n),
            memory_write: None,
        });
    }
    while count_messages(&messages, |m| matches!(m, FromTasker::Stopped { .. }))
        < TASK_COUNT as usize
    {
        messages.push(source.wait_for_message());
    }
    for n in 1..=TASK_COUNT {
        let dir = dir.path().join(format!("images-{n}"));
        source.send(ToTasker::Dump {
            migration: migration_id(n.into()),
            tid: tid(n),
            image_dir: dir,
            memory_socket_path: None,
        });
    }
    while count_messages(&messages, |m| matches!(m, FromTasker::Dumped { .. }))
        < TASK_COUNT as usize
    {
        messages.push(source.wait_for_message());
    }
    for message in &messages {
        if let FromTasker::Dumped { migration, result } = message {
            assert!(result.is_ok(), "{migration}: {result:?}");
        }
    }
    for n in 1..=TASK_COUNT {
        let id = migration_id(n.into());
        target.send(ToTasker::Restore {
            migration: id,
            tid: tid(n),
            image_dir: dir.path().join(format!("images-{n}")),
            memory_write: None,
            memory_socket_path: None,
        });
    }
    let mut restored_migrations = Vec::new();
    while restored_migrations.len() < TASK_COUNT as usize {
        if let FromTasker::Restored { migration, result } = target.wait_for_message() {
            result.expect("a restore");
            restored_migrations.push(migration);
        }
    }
    let mut target_messages = Vec::new();
    for id in restored_migrations {
        let usage = kill_source_and_wait(&mut source, tid(id.0 as u32), id, &mut messages);
        run_and_wait(&mut target, id, usage, &mut target_messages);
    }
    let outputs = (1..=TASK_COUNT)
        .map(|n| output_of(&messages, tid(n)))
        .collect::<Vec<_>>();
    while (1..=TASK_COUNT).any(|n| count_lines(&output_of(&target_messages, tid(n))) < 20) {
        let message = target.wait_for_message();
        assert!(!matches!(message, FromTasker::Exited { .. }), "{message:?}");
        target_messages.push(message);
    }
    for (n, mut output) in (1..=TASK_COUNT).zip(outputs) {
        output.extend(output_of(&target_messages, tid(n)));
        assert_no_line_lost(&output);
    }
    source.stop_and_wait();
    target.stop_and_wait();
}

/// Waits for the tasker's next report about the engine. Returns the engine's version or the error.
fn wait_for_engine_report(tasker: &mut Tasker) -> Result<String, EngineUnavailable> {
    tasker.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::Ready(capabilities) => Some(capabilities.engine_version.clone()),
        _ => None,
    })
}

/// A missing or failing engine is probed again, and is used after a successful probe.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn failed_engine_is_probed_again() {
    require_migration();
    let dir = tempfile::tempdir().expect("dir");
    let (failure_marker, late_engine) = (dir.path().join("broken"), dir.path().join("late"));
    std::fs::write(&failure_marker, "").expect("write");
    let engine = write_engine_wrapper(
        dir.path(),
        &format!("[ -e {} ] && exit 7", failure_marker.display()),
    );
    let start =
        |engine: &Path| Tasker::start_with_env(&[("SEMPA_CRIU", engine.to_str().expect("text"))]);
    let (mut failing_tasker, lacking_tasker) = (start(&engine), start(&late_engine));
    assert!(
        lacking_tasker
            .capabilities
            .engine_version
            .as_ref()
            .is_err_and(|why| why.0.contains("there is no dump engine")),
        "{:?}",
        lacking_tasker.capabilities
    );
    let why = wait_for_engine_report(&mut failing_tasker).expect_err("it fails");
    assert!(
        why.0.contains("failed its trial here") && !why.0.contains("cargo xtask"),
        "{why}"
    );
    std::fs::remove_file(&failure_marker).expect("remove");
    std::os::unix::fs::symlink(&engine, &late_engine).expect("a name");
    for mut tasker in [failing_tasker, lacking_tasker] {
        wait_for_engine_report(&mut tasker).expect("it works now");
        tasker.start_task_and_wait(tid(9), &shell_path(), &["-c", "sleep 1000"]);
        let facts =
            inspect_and_wait(&mut tasker, tid(9), migration_id(9)).expect("it can be moved");
        assert_eq!(
            prepare_and_wait(&mut tasker, tid(8), migration_id(8), facts),
            []
        );
        tasker.stop_and_wait();
    }
}
