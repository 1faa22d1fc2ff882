//! Tests of requests that a resource manager serves, and of the loss of the resource manager.

use super::fake::FakeDaemon;
use super::{wait_for_next_message, wait_until, xdr_message};
use crate::runtime::Runtime;
use crate::vm::Vm;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::message::Message;
use sempa_proto::sm::{
    PlacementLease, SM_CONFIG, SM_NOTIFY, SM_PLACEMENT_LEASE, SM_SPAWN, SM_SPAWN_WAITS,
    pack_placement_lease, pack_spawn_waits, pack_tids, unpack_spawn,
};
use sempa_proto::table::HostTable;
use sempa_proto::task::{
    LeasedSpawn, NotifyRequest, NotifySubjects, Reply, Request, RmInfo, RmServices, SpawnRequest,
    ToDaemon, ToTask,
};
use sempa_proto::{HostId, Micros, PvmError, Tid};
use std::collections::VecDeque;
use std::thread;

const ALL_SERVICES: RmServices = RmServices {
    placement: true,
    vm_requests: true,
    task_exits: true,
};

fn worker_request() -> SpawnRequest {
    SpawnRequest {
        program: "worker".into(),
        task_count: 2,
        ..SpawnRequest::default()
    }
}

/// Enrolls a resource manager and a task. The daemon reports the resource manager to the task.
fn enroll_rm_and_task(fake: &FakeDaemon, services: RmServices) -> (Runtime, Runtime) {
    let rm = fake.enroll();
    fake.state().rm = Some(RmInfo {
        tid: rm.tid(),
        services,
    });
    let task = fake.enroll();
    (rm, task)
}

fn send_answer(rm: &Runtime, request_message: &Message, wid: i32, body: bytes::Bytes) {
    let mut reply = xdr_message(request_message.src, request_message.tag, body);
    reply.wid = wid;
    rm.send(reply).expect("answered");
}

/// Reports to `task` that its request has waited since the time `waiting_since`, or for `None` that
/// the request no longer waits. Returns when the report has arrived.
fn report_waiting_and_wait(
    rm: &Runtime,
    task: &Runtime,
    request_message: &Message,
    waiting_since: Option<Micros>,
) {
    let mut report = xdr_message(
        request_message.src,
        SM_SPAWN_WAITS,
        pack_spawn_waits(waiting_since),
    );
    report.wid = request_message.wid;
    rm.send(report).expect("sent");
    wait_until("the word", || {
        (task
            .with_core(|core| core.rm_calls.waiting_since(request_message.wid))
            .flatten()
            == waiting_since)
            .then_some(())
    });
}

/// A spawn request goes to the resource manager, and the caller receives the answer.
#[test]
fn spawn_is_answered_by_rm() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(
        &fake,
        RmServices {
            placement: true,
            vm_requests: false,
            task_exits: true,
        },
    );
    let spawn_results = vec![Ok(Tid::from_raw(0x40009)), Err(PvmError::NoFile)];
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| task.spawn(worker_request()));
        let request_message = wait_for_next_message(&rm);
        assert_eq!(
            (
                request_message.tag,
                unpack_spawn(request_message.body.clone())
            ),
            (SM_SPAWN, Ok((worker_request(), None)))
        );
        send_answer(
            &rm,
            &request_message,
            request_message.wid,
            pack_tids(&spawn_results),
        );
        assert_eq!(
            spawn_thread.join().expect("ended"),
            Ok(spawn_results.clone())
        );
    });
    // Requests that the resource manager does not serve go to the daemon.
    fake.set_responder(|_, request| {
        (*request == Request::Config).then(|| Reply::Hosts(HostTable::default()))
    });
    assert_eq!(task.config(), Ok(HostTable::default()));
}

/// Drains the inbox, and acknowledges each message to its sender.
fn acknowledge_messages(task: &Runtime) -> bool {
    let mut messages = VecDeque::new();
    task.drain_inbox_into(&mut messages);
    for message in messages {
        let acknowledgement = xdr_message(message.src, 8, bytes::Bytes::new());
        task.send(acknowledgement).expect("sent");
    }
    true
}

/// A handle with an intake processes messages while its requests wait for the resource manager or
/// for the daemon.
#[test]
fn intake_processes_messages_during_requests() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    let task = task.with_intake(Some(acknowledge_messages));
    let interrupt = || {
        let message = xdr_message(task.tid(), 7, bytes::Bytes::new());
        rm.send(message).expect("sent");
        // Without the intake no acknowledgement arrives.
        assert_eq!(wait_for_next_message(&rm).tag, 8);
    };
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| task.spawn(worker_request()));
        let request_message = wait_for_next_message(&rm);
        interrupt();
        let results = vec![Err(PvmError::NoFile); 2];
        let answer_body = pack_tids(&results);
        send_answer(&rm, &request_message, request_message.wid, answer_body);
        assert_eq!(spawn_thread.join().expect("ended"), Ok(results));
        let request_thread = scope.spawn(|| task.request_and_wait(Request::NewContext));
        let id = fake.wait_for_request("the request", |r| *r == Request::NewContext);
        interrupt();
        fake.send_reply(task.tid(), id, Reply::Context(5));
        assert_eq!(request_thread.join().expect("ended"), Reply::Context(5));
    });
}

/// A request ends with its reply although another thread has the right to process the messages that
/// have arrived.
#[test]
fn request_does_not_wait_for_intake() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    let task = task.with_intake(Some(|_| false));
    let message = xdr_message(task.tid(), 7, bytes::Bytes::new());
    rm.send(message).expect("sent");
    thread::scope(|scope| {
        let request_thread = scope.spawn(|| task.request_and_wait(Request::NewContext));
        let id = fake.wait_for_request("the request", |r| *r == Request::NewContext);
        fake.send_reply(task.tid(), id, Reply::Context(5));
        assert_eq!(request_thread.join().expect("ended"), Reply::Context(5));
    });
    assert_eq!(wait_for_next_message(&task).tag, 7);
}

/// An answer with a wrong wait id is accepted, as in PVM.
#[test]
fn answer_with_wrong_wait_id_is_accepted() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    thread::scope(|scope| {
        let config_thread = scope.spawn(|| task.config());
        let request_message = wait_for_next_message(&rm);
        assert_eq!(request_message.tag, SM_CONFIG);
        let mut answer_body = Packer::new(Encoding::Xdr);
        answer_body
            .pack_int(1)
            .pack_int(1)
            .pack_int(0x40000)
            .pack_str(b"one")
            .pack_str(b"LINUX64")
            .pack_int(1000)
            .pack_int(7);
        send_answer(&rm, &request_message, 0, answer_body.finish());
        let table = config_thread.join().expect("ended").expect("a table");
        assert_eq!(
            (
                table.hosts.len(),
                table.hosts[0].name.as_str(),
                table.data_format_count()
            ),
            (1, "one", 1)
        );
    });
}

/// Concurrent calls of several threads each receive their own answer, in any order of the answers.
#[test]
fn concurrent_calls_get_their_own_answers() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=8)
            .map(|n| {
                let task = &task;
                scope.spawn(move || {
                    task.spawn(SpawnRequest {
                        task_count: n,
                        ..worker_request()
                    })
                    .expect("answered")
                    .len()
                })
            })
            .collect();
        let mut request_messages: Vec<Message> =
            (0..8).map(|_| wait_for_next_message(&rm)).collect();
        request_messages.reverse();
        for request_message in &request_messages {
            let task_count = unpack_spawn(request_message.body.clone())
                .expect("a spawn")
                .0
                .task_count;
            send_answer(
                &rm,
                request_message,
                request_message.wid,
                pack_tids(&vec![Err(PvmError::NoHost); task_count as usize]),
            );
        }
        let answer_lengths: Vec<usize> = threads
            .into_iter()
            .map(|t| t.join().expect("ended"))
            .collect();
        assert_eq!(answer_lengths, [1, 2, 3, 4, 5, 6, 7, 8]);
    });
}

/// A thread that receives every message in the inbox does not receive a resource manager's answers.
#[test]
fn answers_do_not_reach_inbox() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| task.spawn(worker_request()));
        let receive_thread = scope.spawn(|| wait_for_next_message(&task));
        let request_message = wait_for_next_message(&rm);
        send_answer(
            &rm,
            &request_message,
            request_message.wid,
            pack_tids(&[Err(PvmError::NoHost), Err(PvmError::NoHost)]),
        );
        assert_eq!(
            spawn_thread.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
        rm.send(xdr_message(task.tid(), 5, "for the other"))
            .expect("sent");
        assert_eq!(receive_thread.join().expect("received").tag, 5);
    });
}

/// When the resource manager dies, an unanswered call is sent to the daemon.
#[test]
fn rm_death_redirects_call_to_daemon() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    fake.set_responder(|_, request| {
        matches!(request, Request::Spawn(_)).then(|| Reply::Spawned(vec![Err(PvmError::NoHost); 2]))
    });
    let generation = task.rm_generation();
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| task.spawn(worker_request()));
        wait_for_next_message(&rm);
        assert!(!spawn_thread.is_finished());
        fake.send_control(task.tid(), ToTask::RmChanged { rm: None });
        assert_eq!(
            spawn_thread.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
    });
    assert_eq!((task.rm(), task.rm_generation()), (None, generation + 1));
    // Later requests go to the daemon immediately.
    assert_eq!(
        task.spawn(worker_request()),
        Ok(vec![Err(PvmError::NoHost); 2])
    );
}

/// A spawn request that waits for free slots is sent to the next resource manager, together with
/// the time since which the request waits.
#[test]
fn waiting_spawn_continues_at_next_rm() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    let next_rm = fake.enroll();
    fake.set_responder(|_, request| {
        matches!(request, Request::Spawn(_))
            .then(|| Reply::Spawned(vec![Err(PvmError::HostFail); 2]))
    });
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| task.spawn(worker_request()));
        let request_message = wait_for_next_message(&rm);
        report_waiting_and_wait(&rm, &task, &request_message, Some(Micros(5_000_000)));
        fake.send_control(task.tid(), ToTask::RmChanged { rm: None });
        wait_until("the death", || task.rm().is_none().then_some(()));
        fake.send_control(
            task.tid(),
            ToTask::RmChanged {
                rm: Some(RmInfo {
                    tid: next_rm.tid(),
                    services: ALL_SERVICES,
                }),
            },
        );
        let repeated_request = wait_for_next_message(&next_rm);
        assert_eq!(
            unpack_spawn(repeated_request.body.clone()),
            Ok((worker_request(), Some(Micros(5_000_000))))
        );
        send_answer(
            &next_rm,
            &repeated_request,
            repeated_request.wid,
            pack_tids(&[Err(PvmError::NoHost), Err(PvmError::NoHost)]),
        );
        assert_eq!(
            spawn_thread.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
    });
    assert_eq!(task.check_inbox(&mut |inbox| inbox.get(0).cloned()), None);
}

/// A spawn request that no longer waited when the resource manager died goes to the daemon.
#[test]
fn spawn_not_waiting_at_rm_death_goes_to_daemon() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    fake.set_responder(|_, request| {
        matches!(request, Request::Spawn(_)).then(|| Reply::Spawned(vec![Err(PvmError::NoHost); 2]))
    });
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| task.spawn(worker_request()));
        let request_message = wait_for_next_message(&rm);
        for waiting_since in [Some(Micros(7)), None] {
            report_waiting_and_wait(&rm, &task, &request_message, waiting_since);
        }
        fake.send_control(task.tid(), ToTask::RmChanged { rm: None });
        assert_eq!(
            spawn_thread.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
    });
}

#[test]
fn rm_replacement_does_not_repeat_call() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    let new_rm = fake.enroll();
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| task.spawn(worker_request()));
        let request_message = wait_for_next_message(&rm);
        let new_rm_info = RmInfo {
            tid: new_rm.tid(),
            services: ALL_SERVICES,
        };
        fake.send_control(
            task.tid(),
            ToTask::RmChanged {
                rm: Some(new_rm_info),
            },
        );
        wait_until("the news", || {
            (task.rm() == Some(new_rm_info)).then_some(())
        });
        send_answer(
            &rm,
            &request_message,
            request_message.wid,
            pack_tids(&[Err(PvmError::NoHost), Err(PvmError::NoHost)]),
        );
        assert_eq!(
            spawn_thread.join().expect("ended"),
            Ok(vec![Err(PvmError::NoHost); 2])
        );
    });
    assert_eq!(new_rm.check_inbox(&mut |inbox| inbox.get(0).cloned()), None);
}

fn single_request() -> SpawnRequest {
    SpawnRequest {
        task_count: 1,
        ..worker_request()
    }
}

/// Spawns one task. The resource manager answers and leases hosts for further spawns. Returns the
/// wait id of the request.
fn spawn_with_lease(
    rm: &Runtime,
    task: &Runtime,
    child: Tid,
    host_indices: &[u16],
    lease_duration: Micros,
) -> i32 {
    spawn_several_with_lease(rm, task, &[child], (host_indices, lease_duration))
}

/// As [`spawn_with_lease`], but one request spawns several tasks.
fn spawn_several_with_lease(
    rm: &Runtime,
    task: &Runtime,
    children: &[Tid],
    (hosts, lease_duration): (&[u16], Micros),
) -> i32 {
    let hosts: Vec<HostId> = hosts
        .iter()
        .map(|host| HostId::new(*host).expect("a host"))
        .collect();
    let spawn_results: Vec<_> = children.iter().copied().map(Ok).collect();
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| {
            task.spawn(SpawnRequest {
                task_count: children.len() as u32,
                ..worker_request()
            })
        });
        let request_message = wait_for_next_message(rm);
        send_answer(
            rm,
            &request_message,
            request_message.wid,
            pack_tids(&spawn_results),
        );
        assert_eq!(spawn_thread.join().expect("ended"), Ok(spawn_results));
        let mut lease_message = xdr_message(
            request_message.src,
            SM_PLACEMENT_LEASE,
            pack_placement_lease(&PlacementLease {
                hosts,
                validity_time: lease_duration,
            }),
        );
        lease_message.wid = request_message.wid;
        rm.send(lease_message).expect("sent");
        let mut later_message = xdr_message(request_message.src, 5, "behind the grant");
        later_message.ctx = 5;
        rm.send(later_message).expect("sent");
        assert_eq!(
            wait_for_next_message(task).tag,
            5,
            "a grant is no message to the program"
        );
        request_message.wid
    })
}

/// Spawns tasks and checks that the spawn request goes to the resource manager.
fn spawn_and_expect_rm_call(rm: &Runtime, task: &Runtime, request: SpawnRequest) {
    thread::scope(|scope| {
        let spawn_thread = scope.spawn(|| task.spawn(request.clone()));
        let request_message = wait_for_next_message(rm);
        assert_eq!(
            unpack_spawn(request_message.body.clone()),
            Ok((request.clone(), None))
        );
        send_answer(
            rm,
            &request_message,
            request_message.wid,
            pack_tids(&[Err(PvmError::NoFile)]),
        );
        assert_eq!(
            spawn_thread.join().expect("ended"),
            Ok(vec![Err(PvmError::NoFile)])
        );
    });
}

const CHILD: Tid = Tid::from_raw(0x40009);
const LEASE_DURATION: Micros = Micros::from_secs(3600);

/// Makes the daemon start leased tasks. Starting a task on the host with the index 3 fails.
fn start_leased_tasks(fake: &FakeDaemon) {
    let start_result = |host: &HostId| match host.index() {
        3 => Err(PvmError::OutOfRes),
        _ => Ok(Tid::for_task(*host, 7).expect("a task")),
    };
    fake.set_responder(move |_, request| match request {
        Request::SpawnLeased {
            lease: leased_spawn,
            ..
        } => Some(Reply::Spawned(
            leased_spawn.hosts.iter().map(start_result).collect(),
        )),
        _ => None,
    });
}

/// A placement lease serves requests that differ from the leased request only in the arguments of
/// the program. Other requests go to the resource manager.
#[test]
fn lease_serves_similar_requests_only() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(
        &fake,
        RmServices {
            placement: true,
            vm_requests: false,
            task_exits: true,
        },
    );
    start_leased_tasks(&fake);
    let wid = spawn_with_lease(&rm, &task, CHILD, &[2, 1], LEASE_DURATION);
    let spawn_result_on = |host: u16| {
        Ok(vec![Ok(Tid::for_task(
            HostId::new(host).expect("a host"),
            7,
        )
        .expect("a task"))])
    };
    assert_eq!(
        task.spawn(SpawnRequest {
            args: vec![b"other words".to_vec()],
            ..single_request()
        }),
        spawn_result_on(2)
    );
    let expected_lease = LeasedSpawn {
        rm: rm.tid(),
        lease_wid: wid,
        hosts: vec![HostId::new(2).expect("a host")],
    };
    fake.wait_for_request(
        "the request",
        |daemon_request| matches!(daemon_request, Request::SpawnLeased { lease: leased_spawn, request } if *leased_spawn == expected_lease && request.args.len() == 1),
    );
    assert_eq!(task.spawn(single_request()), spawn_result_on(1));
    spawn_and_expect_rm_call(&rm, &task, single_request());
    let different_requests = [
        SpawnRequest {
            program: "other".into(),
            ..single_request()
        },
        SpawnRequest {
            flags: 1,
            ..single_request()
        },
        SpawnRequest {
            where_arg: "there".into(),
            ..single_request()
        },
        SpawnRequest {
            env: vec![b"A=1".to_vec()],
            ..single_request()
        },
    ];
    for different_request in different_requests {
        spawn_with_lease(&rm, &task, CHILD, &[1], LEASE_DURATION);
        spawn_and_expect_rm_call(&rm, &task, different_request);
    }
}

/// If some of several leased tasks cannot be started, only these tasks are requested from the
/// resource manager.
#[test]
fn failed_leased_tasks_go_to_rm() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(
        &fake,
        RmServices {
            placement: true,
            vm_requests: false,
            task_exits: true,
        },
    );
    start_leased_tasks(&fake);
    let request_for_three = SpawnRequest {
        task_count: 3,
        ..worker_request()
    };
    let start_result_on =
        |host: u16| Ok(Tid::for_task(HostId::new(host).expect("a host"), 7).expect("a task"));
    let grant_lease =
        |hosts: &[u16]| spawn_several_with_lease(&rm, &task, &[CHILD; 3], (hosts, LEASE_DURATION));
    grant_lease(&[1, 2, 1, 2, 1]);
    assert_eq!(
        task.spawn(request_for_three.clone()),
        Ok(vec![
            start_result_on(1),
            start_result_on(2),
            start_result_on(1)
        ])
    );
    let check_failed_tasks_at_rm =
        |rm_results: &[Result<Tid, PvmError>], expected_results: Vec<Result<Tid, PvmError>>| {
            thread::scope(|scope| {
                let spawn_thread = scope.spawn(|| task.spawn(request_for_three.clone()));
                let request_message = wait_for_next_message(&rm);
                let (request_at_rm, _) =
                    unpack_spawn(request_message.body.clone()).expect("a request");
                assert_eq!(request_at_rm.task_count as usize, rm_results.len());
                send_answer(
                    &rm,
                    &request_message,
                    request_message.wid,
                    pack_tids(rm_results),
                );
                assert_eq!(spawn_thread.join().expect("ended"), Ok(expected_results));
            });
        };
    let failure = Err(PvmError::NoFile);
    check_failed_tasks_at_rm(&[failure; 3], vec![failure; 3]);
    grant_lease(&[3, 2, 3]);
    check_failed_tasks_at_rm(
        &[start_result_on(4), failure],
        vec![start_result_on(4), start_result_on(2), failure],
    );
}

/// A spawn request goes to the resource manager if its lease has expired, if a leased host fails,
/// or if the resource manager that granted the lease was replaced.
#[test]
fn invalid_lease_falls_back_to_rm() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(
        &fake,
        RmServices {
            placement: true,
            vm_requests: false,
            task_exits: true,
        },
    );
    start_leased_tasks(&fake);
    spawn_with_lease(&rm, &task, CHILD, &[1], Micros(0));
    spawn_and_expect_rm_call(&rm, &task, single_request());
    spawn_with_lease(&rm, &task, CHILD, &[3], LEASE_DURATION);
    spawn_and_expect_rm_call(&rm, &task, single_request());
    spawn_with_lease(&rm, &task, CHILD, &[1], LEASE_DURATION);
    let new_rm = fake.enroll();
    let new_rm_info = RmInfo {
        tid: new_rm.tid(),
        services: RmServices {
            placement: true,
            vm_requests: false,
            task_exits: true,
        },
    };
    fake.send_control(
        task.tid(),
        ToTask::RmChanged {
            rm: Some(new_rm_info),
        },
    );
    wait_until("the news", || {
        (task.rm() == Some(new_rm_info)).then_some(())
    });
    spawn_and_expect_rm_call(&new_rm, &task, single_request());
}

#[test]
fn rm_itself_uses_daemon() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.set_responder(|_, request| {
        (*request == Request::Config).then(|| Reply::Hosts(HostTable::default()))
    });
    fake.send_control(
        task.tid(),
        ToTask::RmChanged {
            rm: Some(RmInfo {
                tid: task.tid(),
                services: ALL_SERVICES,
            }),
        },
    );
    wait_until("the news", || task.rm());
    assert_eq!(task.config(), Ok(HostTable::default()));
}

#[test]
fn notify_message_has_documented_format() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    let tids = vec![Tid::from_raw(0x40005), Tid::from_raw(0x40006)];
    task.notify(NotifyRequest {
        subjects: NotifySubjects::TaskExit(tids),
        ctx: 3,
        tag: 4,
        is_cancellation: true,
    })
    .expect("sent");
    let request_message = wait_for_next_message(&rm);
    let body_ints = Unpacker::new_xdr(request_message.body.clone()).read_ints(6);
    assert_eq!(
        (request_message.tag, body_ints),
        (SM_NOTIFY, Ok(vec![257, 3, 4, 2, 0x40005, 0x40006]))
    );
}

#[test]
fn malformed_rm_answers_are_errors() {
    let fake = FakeDaemon::start();
    let (rm, task) = enroll_rm_and_task(&fake, ALL_SERVICES);
    let mut negative_count_body = Packer::new(Encoding::Xdr);
    negative_count_body.pack_int(PvmError::OutOfRes.code());
    let mut excessive_count_body = Packer::new(Encoding::Xdr);
    excessive_count_body.pack_int(i32::MAX).pack_int(1);
    for body in [
        bytes::Bytes::new(),
        negative_count_body.finish(),
        excessive_count_body.finish(),
        pack_tids(&[Ok(Tid::from_raw(0x40009))]),
    ] {
        let calls: [fn(&Runtime) -> bool; 3] = [
            |t| t.spawn(worker_request()).is_err(),
            |t| t.config().is_err(),
            |t| t.add_hosts(vec!["a".into(), "b".into()]).is_err(),
        ];
        for call in calls {
            thread::scope(|scope| {
                let call_thread = scope.spawn(|| call(&task));
                let request_message = wait_for_next_message(&rm);
                send_answer(&rm, &request_message, request_message.wid, body.clone());
                assert!(call_thread.join().expect("no panic"));
            });
        }
    }
}

/// A reply of the wrong kind is a protocol error. A failure reply retains its code and reason.
#[test]
fn reply_of_wrong_kind_is_an_error() {
    let fake = FakeDaemon::start();
    let vm = Vm::from_runtime(fake.enroll());
    fake.set_responder(|_, _| Some(Reply::Done));
    assert_eq!(vm.config().expect_err("not a table").code, PvmError::BadMsg);
    assert_eq!(
        vm.events(0, 1).expect_err("no events").code,
        PvmError::BadMsg
    );
    fake.set_responder(|_, _| {
        Some(Reply::Failed {
            error: PvmError::NoHost,
            reason: "there is no host x".into(),
        })
    });
    assert_eq!(
        vm.tasks(Tid::NONE).expect_err("failed").to_string(),
        "there is no host x"
    );
}

/// The resource manager's order to start tasks goes to the daemon of the host.
#[test]
fn exec_goes_to_daemon_of_host() {
    let fake = FakeDaemon::start();
    let vm = Vm::from_runtime(fake.enroll());
    let host = HostId::new(2).expect("an index");
    let wid = vm
        .request_exec(host, vm.tid(), &worker_request())
        .expect("sent");
    let logged_request =
        fake.wait_for_log("the order", |_, control_message| match control_message {
            ToDaemon::Message(m) => Some(m.clone()),
            _ => None,
        });
    assert_eq!(
        (logged_request.dst, logged_request.tag, logged_request.wid),
        (host.daemon_tid(), sempa_proto::sm::SM_EXEC, wid)
    );
}
