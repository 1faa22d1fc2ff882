//! Tests refusals. A task with a resource that does not survive a migration is refused before it is
//! stopped, and continues.

use super::TASK_USER;
use super::common::{tid, user_dir, wait_until};
use super::fixture::MigrationFixture;
use checkpoint::proc;
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::migration::Refusal;
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, chown};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_io_uring_ring_is_refused() {
    assert_refused("uring", "", "an io_uring ring");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_userfaultfd_is_refused() {
    assert_refused("userfaultfd", "", "a userfaultfd");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_perf_event_is_refused() {
    assert_refused("perf", "", "a perf event");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn secret_memory_is_refused() {
    assert_refused("secret", "", "secret memory (memfd_secret)");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn system_v_shared_memory_is_refused() {
    assert_refused("sysv-memory", "", "System V shared memory");
}

/// System V shared memory that is not mapped is refused.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn unmapped_sysv_shared_memory_is_refused() {
    assert_refused("sysv-memory-unmapped", "", "System V shared memory");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn system_v_semaphores_are_refused() {
    assert_refused("sysv-semaphore", "", "System V semaphores");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_system_v_message_queue_is_refused() {
    assert_refused("sysv-queue", "", "a System V message queue");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_posix_message_queue_is_refused() {
    assert_refused("posix-queue", "", "the POSIX message queue /sempa-");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn named_posix_shared_memory_is_refused() {
    assert_refused("posix-memory", "", "POSIX shared memory (/dev/shm/sempa-");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_device_is_refused() {
    assert_refused("device", "", "the device /dev/");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_lock_on_a_file_is_refused() {
    assert_refused("whole-lock", "", "a lock on the file");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_record_lock_is_refused() {
    assert_refused("record-lock", "", "a lock on the file");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_open_file_lock_is_refused() {
    assert_refused("open-file-lock", "", "a lock on the file");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_lease_is_refused() {
    assert_refused("lease", "", "a lock on the file");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_process_that_left_the_tree_is_refused() {
    assert_refused("orphan", "", "a background process (refused, process");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_deleted_file_with_another_name_is_refused() {
    assert_refused("linked", "", "which still has another name");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_removed_working_directory_is_refused() {
    assert_refused(
        "removed-directory",
        "",
        "a working directory that was removed",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_user_namespace_of_its_own_is_refused() {
    assert_refused("own-users", "", "a user namespace of its own");
}

/// A task whose main thread has ended before its other threads is refused.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn ended_main_thread_is_refused() {
    let mut fixture = MigrationFixture::for_refusal();
    let program = fixture.compile_c("threads");
    fixture.start_and_wait_until_ready(&program, &[], "leaderless", "");
    let result = fixture.inspect();
    let expected = "a main thread that has ended before the others";
    assert!(
        matches!(&result, Err(Refusal::UnsupportedResource { what }) if what == expected),
        "{result:?}"
    );
    fixture.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_tcp_connection_to_a_stranger_is_refused() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("bound").port().to_string();
    assert_refused(
        "tcp",
        &port,
        &format!("a TCP connection to 127.0.0.1:{port}"),
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_unix_socket_connected_to_a_stranger_is_refused() {
    let mut fixture = MigrationFixture::for_refusal();
    let program = fixture.compile_c("refused");
    let path = fixture.dir.path().join("stranger").display().to_string();
    let listener = UnixListener::bind(&path).expect("bind");
    give_to_task(&path);
    fixture.start_and_wait_until_ready(&program, &[], "unix-socket", &path);
    let (_connection, _) = listener.accept().expect("it has connected");
    let result = fixture.inspect();
    let expected = format!("a Unix socket connected to {path}");
    assert!(
        matches!(&result, Err(Refusal::UnsupportedResource { what }) if *what == expected),
        "{result:?}"
    );
    fixture.assert_ends_successfully();
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn named_pipe_that_a_stranger_has_open_is_refused() {
    let dir = user_dir(TASK_USER);
    let path = dir.path().join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("fifo");
    give_to_task(&path);
    let _open_pipe = std::fs::File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&path)
        .expect("open");
    let path = path.display().to_string();
    assert_refused(
        "foreign-pipe",
        &path,
        &format!("the named pipe {path}, which another process has open"),
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_terminal_of_somebody_else_is_refused() {
    let terminal = openpty(None, None).expect("a terminal");
    let name = nix::unistd::ttyname(&terminal.slave)
        .expect("a name")
        .display()
        .to_string();
    give_to_task(&name);
    assert_refused(
        "terminal",
        &name,
        &format!("the terminal {name}, whose master end is held by another process"),
    );
}

/// Lets the user of the tasks use the file `path`.
fn give_to_task(path: impl AsRef<std::path::Path>) {
    chown(path, TASK_USER, TASK_USER).expect("root may do so");
}

/// Asserts that a task is refused while one of its threads is traced: the first thread if
/// `trace_first_thread` is true, otherwise the second.
fn assert_refused_while_traced(trace_first_thread: bool) {
    let mut fixture = MigrationFixture::for_refusal();
    let program = fixture.compile_c("refused");
    fixture.start_and_wait_until_ready(&program, &[], "traced", "");
    let namespace_tid = wait_for_second_thread_id(&mut fixture);
    let root_pid = program_processes(&program)[0];
    let traced_tid = if trace_first_thread {
        root_pid
    } else {
        thread_id_outside(root_pid, namespace_tid)
    };
    let mut tracer = Command::new(&program)
        .args(["tracer", "/", &traced_tid.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut tracer_output = [0u8; 7];
    tracer
        .stdout
        .as_mut()
        .expect("piped")
        .read_exact(&mut tracer_output)
        .expect("it says something");
    let cannot_trace = &tracer_output != b"traces\n";
    let result = fixture.inspect();
    drop(tracer.stdin.take());
    tracer.wait().expect("it ends");
    if cannot_trace {
        eprintln!("nothing may be traced here");
    } else {
        assert!(
            matches!(&result, Err(Refusal::UnsupportedResource { what }) if what == "a debugger"),
            "{result:?}"
        );
    }
    assert!(
        fixture.inspect().is_ok(),
        "without it nothing is in the way"
    );
    fixture.migrate_there_and_back();
    fixture.assert_ends_successfully();
}

/// Waits until the program has printed the id of its second thread. Returns that id, which is valid
/// in the task's namespace.
fn wait_for_second_thread_id(fixture: &mut MigrationFixture) -> i32 {
    let parse_tid = |text: &[u8]| -> Option<i32> {
        let text = String::from_utf8_lossy(text).into_owned();
        text.lines()
            .find_map(|line| line.strip_prefix("thread ")?.parse().ok())
    };
    fixture
        .source
        .wait_for_output(tid(1), &mut fixture.output, |text| {
            parse_tid(text).is_some()
        });
    parse_tid(&fixture.output).expect("just seen")
}

fn program_processes(program: &std::path::Path) -> Vec<i32> {
    super::common::processes_with_text(program.to_str().expect("text"))
}

/// Returns the id, in the test's PID namespace, of the thread of the process `pid` whose id in the
/// task's namespace is `namespace_tid`.
fn thread_id_outside(pid: i32, namespace_tid: i32) -> i32 {
    let threads = proc::thread_ids(pid).expect("proc");
    let has_namespace_tid = |thread: &i32| proc::innermost_pid(*thread) == Some(namespace_tid);
    threads
        .into_iter()
        .find(has_namespace_tid)
        .expect("the thread")
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_task_under_a_debugger_is_refused() {
    assert_refused_while_traced(true);
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_task_of_which_one_thread_is_traced_is_refused() {
    assert_refused_while_traced(false);
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_eventfd_that_is_a_semaphore_is_refused() {
    assert_refused("counting-eventfd", "", "an eventfd that is a semaphore");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_pipe_of_packets_is_refused() {
    assert_refused("packets", "", "a pipe in packet mode");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn an_open_file_about_a_process_is_refused() {
    assert_refused("of-a-process", "", "/stat, which is about a process");
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn own_directory_of_a_thread_is_refused() {
    assert_refused(
        "directory-of-a-thread",
        "",
        "with a working directory, root directory and umask of its own",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn own_descriptors_of_a_thread_are_refused() {
    assert_refused(
        "descriptors-of-a-thread",
        "",
        "with a table of descriptors of its own",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_task_in_vfork_is_refused() {
    assert_refused(
        "in-vfork",
        "",
        "processes that share their memory (vfork, or clone with CLONE_VM)",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn child_that_shares_memory_is_refused() {
    assert_refused(
        "memory-of-a-child",
        "",
        "processes that share their memory (vfork, or clone with CLONE_VM)",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn child_that_shares_its_directory_is_refused() {
    assert_refused(
        "directory-of-a-child",
        "",
        "processes that share their working directory",
    );
}

#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_socket_of_another_kind_is_refused() {
    assert_refused("other-socket", "", "a socket of the kind A");
}

/// A task that has used up its descriptors is refused with its limit.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_task_without_free_descriptors_is_refused() {
    assert_refused(
        "few-descriptors",
        "12",
        "a limit of 12 descriptors (RLIMIT_NOFILE), of which 12 are used",
    );
}

/// A task that a signal has stopped is refused at once, and may migrate when it continues.
#[test]
#[ignore = "system tier: needs CRIU and gcc"]
fn a_task_stopped_by_a_signal_is_refused() {
    let mut fixture = MigrationFixture::for_refusal();
    let program = fixture.compile_c("processes");
    fixture.start_and_wait_until_ready(&program, &[], "batch", "");
    let root_pid = program_processes(&program)[0];
    let signal_root = |signal| kill(Pid::from_raw(root_pid), signal).expect("it is there");
    signal_root(Signal::SIGSTOP);
    wait_until("it is stopped", || {
        proc::stat(root_pid).is_some_and(|stat| stat.state == 'T')
    });
    let result = fixture.inspect();
    assert!(
        matches!(&result, Err(Refusal::UnsupportedResource { what }) if what.contains("stopped by a signal")),
        "{result:?}"
    );
    signal_root(Signal::SIGCONT);
    fixture.migrate_there_and_back();
    fixture.assert_ends_successfully();
}

/// Asserts that the task is refused for the reason `reason`, and that it continues. The task
/// executes the C program `refused`, with `row` and `last_arg` as arguments.
pub(crate) fn assert_refused(row: &str, last_arg: &str, reason: &str) {
    let mut fixture = MigrationFixture::for_refusal();
    let program = fixture.compile_c("refused");
    fixture.start_and_wait_until_ready(&program, &[], row, last_arg);
    let result = fixture.inspect();
    assert!(
        matches!(&result, Err(Refusal::UnsupportedResource { what }) if what.contains(reason)),
        "{row}: {result:?}"
    );
    fixture.assert_ends_successfully();
}
