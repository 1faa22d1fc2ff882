//! Tests of the Rust API in a real virtual machine with one host. Each test process connects as one
//! or more tasks.

use libpvm::proto::task::{Claim, OnDaemonExit, Sink};
use libpvm::proto::{HostId, PvmError, Tid};
use libpvm::runtime::EnrollOptions;
use libpvm::{Body, Content, Match, Notice, Runtime, Vm};
use sempa_tests::private_vm::PrivateVm;
use sempa_tests::run::run_to_end;
use sempa_tests::wait_for;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Connects a new task to the virtual machine.
fn enroll_task(private_vm: &PrivateVm) -> Vm {
    let options = EnrollOptions {
        socket: private_vm.socket_path(),
        claim: Claim::NotSpawned,
        program: "api".into(),
        on_daemon_exit: OnDaemonExit::FailCalls,
        has_automatic_routes: true,
    };
    Vm::from_runtime(Runtime::connect(options).expect("a daemon"))
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn values_and_items_go_from_task_to_task() {
    let private_vm = PrivateVm::start(None);
    let (a, b) = (enroll_task(&private_vm), enroll_task(&private_vm));
    let task_b = a.task(b.tid());
    task_b
        .send_value(1, &("range", 3u64, vec![1.5f64]))
        .expect("sent");
    task_b
        .send(2, Body::items(|out| out.pack_int(7).pack_str(b"seven")))
        .expect("sent");
    task_b.send(3, "text").expect("sent");
    let (sender, value) = b
        .recv_value::<(String, u64, Vec<f64>)>(Match::any().tag(1))
        .expect("received");
    assert_eq!(
        (sender.tid(), value),
        (a.tid(), ("range".to_string(), 3, vec![1.5]))
    );
    let message = b
        .recv_where(|message| message.tag == 2 && message.body.len() == 16)
        .expect("received");
    let mut items = message.items().expect("items");
    assert_eq!(
        (items.read_int(), items.read_string().as_deref()),
        (Ok(7), Ok("seven"))
    );
    let text_message = b.task(a.tid()).recv(3).expect("received");
    assert_eq!(
        text_message
            .items()
            .expect("items")
            .read_string()
            .as_deref(),
        Ok("text")
    );
    assert_eq!(
        text_message.value::<String>().expect_err("no value").code,
        PvmError::BadMsg
    );
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn several_threads_may_wait_for_different_messages() {
    let private_vm = PrivateVm::start(None);
    let vm = enroll_task(&private_vm);
    thread::scope(|scope| {
        let receiver_threads: Vec<_> = (0..8)
            .map(|tag| {
                let vm = &vm;
                scope.spawn(move || {
                    vm.recv_value::<i32>(Match::any().tag(tag))
                        .expect("received")
                        .1
                })
            })
            .collect();
        let own_task = vm.task(vm.tid());
        (0..8)
            .rev()
            .for_each(|tag| own_task.send_value(tag, &(tag * 10)).expect("sent"));
        let received_values: Vec<i32> = receiver_threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect();
        assert_eq!(received_values, [0, 10, 20, 30, 40, 50, 60, 70]);
    });
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn tasks_are_started_as_described() {
    let private_vm = PrivateVm::start(None);
    let vm = enroll_task(&private_vm);
    let sink = Sink {
        tid: vm.tid(),
        ctx: 0,
        tag: 9,
    };
    let builder = vm
        .spawner("sh")
        .arg("-c")
        .arg("echo $COLOUR in `pwd`: $0")
        .arg("zero")
        .env("COLOUR", "blue");
    let start_result = builder
        .on_host(".")
        .in_dir("/var")
        .count(2)
        .output_sink(sink)
        .start()
        .expect("asked")
        .all();
    assert_eq!(start_result.expect("both").len(), 2);
    let (mut output, mut ended_output_count) = (String::new(), 0);
    while ended_output_count < 2 {
        let mut items = vm
            .recv(Match::any().tag(9))
            .expect("output")
            .items()
            .expect("items");
        match (items.read_int(), items.read_int()) {
            (Ok(_), Ok(0)) => ended_output_count += 1,
            (Ok(_), Ok(count @ 1..)) => {
                output.push_str(&String::from_utf8_lossy(
                    &items.read_bytes(count as usize).expect("bytes"),
                ));
            }
            _ => {}
        }
    }
    assert_eq!(output, "blue in /var: zero\n".repeat(2));
    let unknown_program_outcome = vm
        .spawner("no-such-program")
        .count(3)
        .start()
        .expect("asked");
    assert_eq!(
        (
            unknown_program_outcome.tasks.len(),
            unknown_program_outcome.failed.clone()
        ),
        (0, vec![PvmError::NoFile; 3])
    );
    assert_eq!(
        unknown_program_outcome.all().expect_err("none").reason,
        "3 of 3 tasks were not started: No such file"
    );
    let unknown_host_outcome = vm.spawner("sh").on_host("nohost").start().expect("asked");
    assert_eq!(unknown_host_outcome.failed, [PvmError::NoHost]);
}

/// The iterator returns one notice for each killed task and then ends.
#[test]
#[ignore = "system tier: needs installed programs"]
fn exit_notices_come_once_each() {
    let private_vm = PrivateVm::start(None);
    let vm = enroll_task(&private_vm);
    let sleepers = vm
        .spawner("sleep")
        .arg("1000")
        .count(3)
        .start()
        .expect("asked")
        .all()
        .expect("started");
    let tids: Vec<Tid> = sleepers.iter().map(|task| task.tid()).collect();
    let mut notices = vm.watch_tasks(&tids).expect("watched");
    assert_eq!(notices.try_next(), Ok(None));
    assert_eq!(notices.next_timeout(Duration::from_millis(1)), Ok(None));
    assert!(sleepers[0].is_running().expect("asked") && !notices.is_exhausted());
    // The process of the task may not exist yet, so the signal is repeated.
    let mut ended_tids = BTreeSet::new();
    for sleeper in &sleepers {
        let notice = wait_for(TIMEOUT, || {
            sleeper.kill().map_err(|error| error.to_string())?;
            notices
                .next_timeout(Duration::from_millis(50))
                .expect("connected")
                .ok_or_else(|| "it runs".to_string())
        });
        ended_tids.insert(match notice.expect("it ends") {
            Notice::TaskEnded(tid) => tid,
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(ended_tids, tids.into_iter().collect());
    assert!(notices.is_exhausted() && notices.next().is_none());
    assert!(!sleepers[0].is_running().expect("asked"));
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn a_notice_comes_after_the_last_message_of_its_task() {
    const MESSAGE_COUNT: u32 = 500;
    let private_vm = PrivateVm::start(None);
    let (vm, sender) = (enroll_task(&private_vm), enroll_task(&private_vm));
    let mut notices = vm.watch_tasks(&[sender.tid()]).expect("watched");
    let receiver = sender.task(vm.tid());
    (0..MESSAGE_COUNT).for_each(|n| receiver.send_value(1, &n).expect("sent"));
    sender.exit().expect("left");
    assert_eq!(notices.next(), Some(Ok(Notice::TaskEnded(sender.tid()))));
    for n in 0..MESSAGE_COUNT {
        let message = vm
            .try_recv(Match::any().tag(1))
            .expect("connected")
            .expect("it is here");
        assert_eq!(message.value(), Ok(n));
    }
}

/// If [`Notices`](libpvm::Notices) are dropped before their events occur, no messages remain in the
/// inbox.
#[test]
#[ignore = "system tier: needs installed programs"]
fn dropped_notices_leave_nothing() {
    let private_vm = PrivateVm::start(None);
    let (vm, watched_task) = (enroll_task(&private_vm), enroll_task(&private_vm));
    let unknown_host = HostId::new(9).expect("9");
    let host_notices: Vec<_> = vm.watch_hosts(&[unknown_host]).expect("watched").collect();
    assert_eq!(
        host_notices,
        [Ok(Notice::HostRemoved(unknown_host))],
        "a host that is not there is told at once"
    );
    drop(
        vm.watch_tasks(&[watched_task.tid(), watched_task.tid()])
            .expect("watched"),
    );
    drop(vm.watch_new_hosts().expect("watched"));
    assert_eq!(vm.watch_tasks(&[]).expect("nothing to watch").next(), None);
    assert_eq!(
        vm.watch_tasks(&[HostId::MASTER.tid()])
            .expect_err("no task")
            .code,
        PvmError::BadParam
    );
    // The reply is received after all earlier messages of the daemon.
    vm.config().expect("asked");
    assert_eq!(vm.try_recv(Match::any()), Ok(None));
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn the_example_sums_with_its_workers() {
    let private_vm = PrivateVm::start(None);
    let test_program = std::env::current_exe().expect("a path");
    let example_path: PathBuf = test_program
        .ancestors()
        .nth(2)
        .expect("the target folder")
        .join("examples/sum");
    assert!(
        example_path.exists(),
        "cargo builds it with the tests: {}",
        example_path.display()
    );
    let mut command = private_vm.command_in_vm(example_path);
    command.args(["3", "1000000"]);
    let output = run_to_end(command, TIMEOUT)
        .expect("it ends")
        .expect_success("sum")
        .expect("it sums");
    assert_eq!(output.stdout, "333332833333500000\n");
    let exit_result = wait_for(TIMEOUT, || {
        let task_list = private_vm.run_console(&["ps", "-a"]).stdout;
        if task_list.lines().count() == 1 {
            Ok(())
        } else {
            Err(task_list)
        }
    });
    exit_result.expect("no worker stays");
}
