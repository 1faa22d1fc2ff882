//! Tests of the Rust API in a real virtual machine with one host. Each test process connects as one
//! or more tasks.

use libpvm::proto::task::{Claim, OnDaemonExit, Sink};
use libpvm::proto::{HostId, PvmError, Tid};
use libpvm::runtime::EnrollOptions;
use libpvm::{Body, Content, Match, Notice, Runtime, Vm};
use sempa_tests::private_vm::PrivateVm;
use sempa_tests::run::run;
use sempa_tests::wait_for;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Connects a new task to the virtual machine.
fn enroll_task(lab: &PrivateVm) -> Vm {
    let options = EnrollOptions {
        socket: lab.socket(),
        claim: Claim::New,
        program: "api".into(),
        on_daemon_exit: OnDaemonExit::FailCalls,
    };
    Vm::from_runtime(Runtime::connect(options).expect("a daemon"))
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn values_and_items_go_from_task_to_task() {
    let lab = PrivateVm::started(None);
    let (a, b) = (enroll_task(&lab), enroll_task(&lab));
    let to_b = a.task(b.tid());
    to_b.send_value(1, &("range", 3u64, vec![1.5f64]))
        .expect("sent");
    to_b.send(2, Body::items(|out| out.int(7).str(b"seven")))
        .expect("sent");
    to_b.send(3, "text").expect("sent");
    let (from, value) = b
        .recv_value::<(String, u64, Vec<f64>)>(Match::any().tag(1))
        .expect("received");
    assert_eq!(
        (from.tid(), value),
        (a.tid(), ("range".to_string(), 3, vec![1.5]))
    );
    let message = b
        .recv_where(|message| message.tag == 2 && message.body.len() == 16)
        .expect("received");
    let mut items = message.items().expect("items");
    assert_eq!(
        (items.int(), items.string().as_deref()),
        (Ok(7), Ok("seven"))
    );
    let text = b.task(a.tid()).recv(3).expect("received");
    assert_eq!(text.items().expect("items").string().as_deref(), Ok("text"));
    assert_eq!(
        text.value::<String>().expect_err("no value").code,
        PvmError::BadMsg
    );
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn several_threads_may_wait_for_different_messages() {
    let lab = PrivateVm::started(None);
    let vm = enroll_task(&lab);
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..8)
            .map(|tag| {
                let vm = &vm;
                scope.spawn(move || {
                    vm.recv_value::<i32>(Match::any().tag(tag))
                        .expect("received")
                        .1
                })
            })
            .collect();
        let me = vm.task(vm.tid());
        (0..8)
            .rev()
            .for_each(|tag| me.send_value(tag, &(tag * 10)).expect("sent"));
        let got: Vec<i32> = waiting
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect();
        assert_eq!(got, [0, 10, 20, 30, 40, 50, 60, 70]);
    });
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn tasks_are_started_as_described() {
    let lab = PrivateVm::started(None);
    let vm = enroll_task(&lab);
    let sink = Sink {
        tid: vm.tid(),
        ctx: 0,
        tag: 9,
    };
    let spawn = vm
        .spawner("sh")
        .arg("-c")
        .arg("echo $COLOUR in `pwd`: $0")
        .arg("zero")
        .env("COLOUR", "blue");
    let started = spawn
        .on_host(".")
        .in_dir("/var")
        .count(2)
        .output_to(sink)
        .start()
        .expect("asked")
        .all();
    assert_eq!(started.expect("both").len(), 2);
    let (mut text, mut ends) = (String::new(), 0);
    while ends < 2 {
        let mut items = vm
            .recv(Match::any().tag(9))
            .expect("output")
            .items()
            .expect("items");
        match (items.int(), items.int()) {
            (Ok(_), Ok(0)) => ends += 1,
            (Ok(_), Ok(count @ 1..)) => {
                text.push_str(&String::from_utf8_lossy(
                    &items.bytes(count as usize).expect("bytes"),
                ));
            }
            _ => {}
        }
    }
    assert_eq!(text, "blue in /var: zero\n".repeat(2));
    let none = vm
        .spawner("no-such-program")
        .count(3)
        .start()
        .expect("asked");
    assert_eq!(
        (none.tasks.len(), none.failed.clone()),
        (0, vec![PvmError::NoFile; 3])
    );
    assert_eq!(
        none.all().expect_err("none").reason,
        "3 of 3 tasks were not started: No such file"
    );
    let nowhere = vm.spawner("sh").on_host("nohost").start().expect("asked");
    assert_eq!(nowhere.failed, [PvmError::NoHost]);
}

/// Each watched task causes exactly one notice when it exits.
#[test]
#[ignore = "system tier: needs installed programs"]
fn exit_notices_come_once_each() {
    let lab = PrivateVm::started(None);
    let vm = enroll_task(&lab);
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
    assert!(sleepers[0].is_running().expect("asked") && !notices.is_done());
    // The process of the task may not exist yet, so the signal is repeated.
    let mut ended = BTreeSet::new();
    for sleeper in &sleepers {
        let notice = wait_for(TIMEOUT, || {
            sleeper.kill().map_err(|error| error.to_string())?;
            notices
                .next_timeout(Duration::from_millis(50))
                .expect("connected")
                .ok_or_else(|| "it runs".to_string())
        });
        ended.insert(match notice.expect("it ends") {
            Notice::TaskEnded(tid) => tid,
            other => panic!("{other:?}"),
        });
    }
    assert_eq!(ended, tids.into_iter().collect());
    assert!(notices.is_done() && notices.next().is_none());
    assert!(!sleepers[0].is_running().expect("asked"));
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn a_notice_comes_after_the_last_message_of_its_task() {
    const MESSAGES: u32 = 500;
    let lab = PrivateVm::started(None);
    let (vm, other) = (enroll_task(&lab), enroll_task(&lab));
    let mut notices = vm.watch_tasks(&[other.tid()]).expect("watched");
    let to = other.task(vm.tid());
    (0..MESSAGES).for_each(|n| to.send_value(1, &n).expect("sent"));
    other.exit().expect("left");
    assert_eq!(notices.next(), Some(Ok(Notice::TaskEnded(other.tid()))));
    for n in 0..MESSAGES {
        let message = vm
            .try_recv(Match::any().tag(1))
            .expect("connected")
            .expect("it is here");
        assert_eq!(message.value(), Ok(n));
    }
}

/// Notices that are dropped before they occur leave no messages in the queue.
#[test]
#[ignore = "system tier: needs installed programs"]
fn dropped_notices_leave_nothing() {
    let lab = PrivateVm::started(None);
    let (vm, other) = (enroll_task(&lab), enroll_task(&lab));
    let unknown = HostId::new(9).expect("9");
    let gone: Vec<_> = vm.watch_hosts(&[unknown]).expect("watched").collect();
    assert_eq!(
        gone,
        [Ok(Notice::HostGone(unknown))],
        "a host that is not there is told at once"
    );
    drop(
        vm.watch_tasks(&[other.tid(), other.tid()])
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
    let lab = PrivateVm::started(None);
    let own = std::env::current_exe().expect("a path");
    let example: PathBuf = own
        .ancestors()
        .nth(2)
        .expect("the target folder")
        .join("examples/sum");
    assert!(
        example.exists(),
        "cargo builds it with the tests: {}",
        example.display()
    );
    let mut command = lab.command(example);
    command.args(["3", "1000000"]);
    let done = run(command, TIMEOUT)
        .expect("it ends")
        .expect_success("sum")
        .expect("it sums");
    assert_eq!(done.out, "333332833333500000\n");
    let left = wait_for(TIMEOUT, || {
        let tasks = lab.pvm(&["ps", "-a"]).out;
        if tasks.lines().count() == 1 {
            Ok(())
        } else {
            Err(tasks)
        }
    });
    left.expect("no worker stays");
}
